//! Receiving blobs from registries that break off, lie and hang. Against a fake registry.

use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use super::support::{Answer, Asked, BORNE_MAX, Fake};
use dsec_registry::{Digest, Limits, PullError, Settings};

const LEN: usize = 300_000;

fn content() -> Vec<u8> {
    (0..LEN as u32).map(|at| (at.wrapping_mul(2_654_435_761) >> 13) as u8).collect()
}

struct Received {
    result: Result<Vec<u8>, PullError>,
    counted: u64,
    left: bool,
}

/// Receives `content` from a registry that answers so.
async fn receive_within(fake: &Fake, limits: Limits) -> Received {
    let dir = tempfile::tempdir().unwrap();
    let file: PathBuf = dir.path().join("blob");
    let counted = AtomicU64::new(0);
    let client = fake.client(Settings { limits, ..Settings::default() });
    let receiving = client.blob(Digest::of(&content()), LEN as u64, &file, &counted);
    let result = tokio::time::timeout(BORNE_MAX, receiving).await.expect("the registry was not given up");
    let result = result.map(|()| std::fs::read(&file).unwrap());
    Received { left: file.exists(), result, counted: counted.into_inner() }
}

async fn receive(answer: impl Fn(u32, &Asked) -> Answer + Send + Sync + 'static) -> (Received, Vec<Asked>) {
    let tries = AtomicU32::new(0);
    let fake = Fake::start(move |asked| answer(tries.fetch_add(1, Ordering::Relaxed), asked)).await;
    (receive_within(&fake, Limits::default()).await, fake.asked())
}

fn refused(received: &Received) -> &PullError {
    assert!(!received.left, "a part of it is left");
    received.result.as_ref().unwrap_err()
}

#[tokio::test]
async fn a_blob_is_received_whole() {
    let (received, asked) = receive(|_, asked| Answer::ranged(asked, &content())).await;
    assert!(received.result.unwrap() == content());
    assert_eq!((received.counted, asked.len()), (LEN as u64, 1));
    assert_eq!(asked[0].path, format!("/v2/team/app/blobs/{}", Digest::of(&content())));
}

#[tokio::test]
async fn a_connection_that_breaks_off_is_taken_up_where_it_was() {
    let (received, asked) = receive(|tried, asked| {
        let answer = Answer::ranged(asked, &content());
        if tried < 3 { answer.cut(90_000) } else { answer }
    })
    .await;
    assert!(received.result.unwrap() == content());
    assert_eq!(received.counted, LEN as u64);
    let ranges: Vec<_> = asked.iter().map(|asked| asked.header("range").unwrap_or("all")).collect();
    assert_eq!(ranges, ["all", "bytes=90000-", "bytes=180000-", "bytes=270000-"]);
}

#[tokio::test]
async fn only_tries_without_progress_are_counted() {
    let two = Limits { tries: 2, ..Limits::default() };
    let fake = Fake::start(|asked| Answer::ranged(asked, &content()).cut(70_000)).await;
    let received = receive_within(&fake, two).await;
    assert!(received.result.unwrap() == content());
    assert_eq!(fake.asked().len(), 5);
    let fake = Fake::start(|asked| Answer::ranged(asked, &content()).cut(10)).await;
    let received = receive_within(&fake, two).await;
    assert!(matches!(refused(&received), PullError::CutOff { received: 20, .. }), "{:?}", received.result);
    assert_eq!(fake.asked().len(), 2);
}

#[tokio::test]
async fn a_registry_that_gives_no_parts_is_asked_for_the_whole() {
    for first in [
        Answer::new(200, content()),
        Answer::new(416, ""),
        Answer::new(206, "x").with("content-range", "bytes 5-5/6"),
    ] {
        let (received, _) = receive(move |tried, _| match tried {
            0 => Answer::new(200, content()).cut(100_000),
            1 => first.clone(),
            _ => Answer::new(200, content()),
        })
        .await;
        assert!(received.result.unwrap() == content());
        assert_eq!(received.counted, LEN as u64);
    }
}

#[tokio::test]
async fn a_damaged_blob_is_refused_and_nothing_of_it_left() {
    let damaged = || {
        let mut damaged = content();
        damaged[200_000] ^= 1;
        damaged
    };
    let (received, asked) = receive(move |_, asked| Answer::ranged(asked, &damaged())).await;
    let error = refused(&received);
    assert!(
        matches!(error, PullError::DigestMismatch { what, .. } if *what == Digest::of(&content())),
        "{error}"
    );
    assert_eq!(asked.len(), 1, "asking again does not mend it");
}

#[tokio::test]
async fn parts_that_do_not_fit_together_are_asked_for_as_a_whole() {
    let (received, asked) = receive(|tried, asked| match tried {
        0 => Answer::new(200, content()).cut(100_000),
        // The right place, and the wrong bytes.
        1 => Answer::new(206, vec![0; LEN - 100_000])
            .with("content-range", format!("bytes 100000-{}/{LEN}", LEN - 1)),
        _ => Answer::ranged(asked, &content()),
    })
    .await;
    assert!(received.result.unwrap() == content());
    assert_eq!(asked[2].header("range"), None);
}

#[tokio::test]
async fn more_than_the_manifest_says_is_not_taken() {
    let (received, _) = receive(|_, _| Answer::new(200, [content(), vec![0]].concat())).await;
    assert!(matches!(refused(&received), PullError::TooLarge { .. }));
    let (received, asked) = receive(|_, _| Answer::new(200, &content()[..LEN - 1])).await;
    assert!(matches!(refused(&received), PullError::CutOff { .. }));
    assert!(asked.len() > 1);
}

#[tokio::test]
async fn a_registry_that_falls_silent_is_given_up() {
    let short = Limits { stall: Duration::from_millis(50), tries: 3, ..Limits::default() };
    let fake = Fake::start(|_| Answer::new(200, content()).hang(10)).await;
    let received = receive_within(&fake, short).await;
    assert!(matches!(refused(&received), PullError::Stalled { .. }), "{:?}", received.result);
    assert_eq!(fake.asked().len(), 3);
    // It resumes with the next connection where it can.
    let tries = AtomicU32::new(0);
    let fake = Fake::start(move |asked| match tries.fetch_add(1, Ordering::Relaxed) {
        0 => Answer::new(200, content()).hang(100_000),
        _ => Answer::ranged(asked, &content()),
    })
    .await;
    let received = receive_within(&fake, short).await;
    assert!(received.result.unwrap() == content());
    assert_eq!(fake.asked()[1].header("range"), Some("bytes=100000-"));
}

#[tokio::test]
async fn a_registry_that_gives_too_little_for_too_long_is_given_up() {
    let short = Limits { stall: Duration::from_millis(100), tries: 2, ..Limits::default() };
    let fake = Fake::start(|_| Answer::new(200, content()).drip(10, Duration::from_millis(5))).await;
    let received = receive_within(&fake, short).await;
    assert!(matches!(refused(&received), PullError::Stalled { .. }), "{:?}", received.result);
    assert_eq!(fake.asked().len(), 2);
}

#[tokio::test]
async fn a_registry_that_gives_the_same_again_and_again_is_given_up() {
    // By turns next to nothing and enough to count as progress, always from the beginning.
    let (received, asked) = receive(|tried, _| {
        let given = if tried % 2 == 0 { 10 } else { 70_000 };
        Answer::new(200, content()).cut(given)
    })
    .await;
    assert!(matches!(refused(&received), PullError::CutOff { .. }), "{:?}", received.result);
    assert_eq!(asked.len(), 200);
}

#[tokio::test]
async fn a_blob_that_is_not_there_is_named() {
    let (received, asked) = receive(|_, _| Answer::new(404, "")).await;
    let error = refused(&received).to_string();
    assert!(error.contains(&Digest::of(&content()).to_string()), "{error}");
    assert_eq!(asked.len(), 1);
}
