//! The engine against a store that fails in every way: a reader gets the right bytes, or an error, never others.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod support;

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use dsec_fill::cache::{Cache, LetGo, Mark};
use dsec_fill::engine::{Engine, FillError, Limits};
use futures_util::future::join_all;
use proptest::prelude::*;
use support::{BOOT, Bench, Fault, GROUP, Made, quick};

fn made() -> Made {
    Made::new(1, 40 * GROUP + 3 * 4096)
}

#[tokio::test(flavor = "multi_thread")]
async fn each_fault_that_passes_is_waited_out_and_each_that_stays_fails_the_read() {
    let made = made();
    for fault in [
        Fault::Corrupt,
        Fault::Truncated,
        Fault::Swapped,
        Fault::Zeros,
        Fault::Missing,
        Fault::Outage,
        Fault::Silent,
    ] {
        let bench = Bench::new(&[&made], Limits { outage_ms: 700, attempt_ms: 100, ..Limits::default() });
        let blob = bench.blob(&made).await;
        bench.store.fail(fault, 2);
        let range = 5 * GROUP - 10..5 * GROUP + 10;
        assert_eq!(bench.engine.read(&blob, range.clone()).await.unwrap(), made.part(range), "{fault:?}");

        bench.store.fail(fault, u64::MAX);
        let range = 20 * GROUP..20 * GROUP + 10;
        let error = bench.engine.read(&blob, range.clone()).await.unwrap_err();
        let fits = match fault {
            Fault::Corrupt | Fault::Swapped | Fault::Zeros => matches!(error, FillError::Damaged { .. }),
            Fault::Missing => matches!(error, FillError::Missing { .. }),
            _ => matches!(error, FillError::Unreachable { .. }),
        };
        assert!(fits, "{fault:?} gave {error:?}");
        assert!(!blob.cached().has(20), "{fault:?} filled a group");
        assert_eq!(blob.counts().failed_reads, 1);

        // What is in the cache needs no store, and what is not is only refused while the store fails.
        assert_eq!(
            bench.engine.read(&blob, 4 * GROUP..4 * GROUP + 1).await.unwrap(),
            made.part(4 * GROUP..4 * GROUP + 1)
        );
        bench.store.fail(Fault::None, 0);
        assert_eq!(bench.engine.read(&blob, range.clone()).await.unwrap(), made.part(range), "{fault:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_outage_shorter_than_the_limit_is_only_slow() {
    let made = made();
    let bench = Bench::new(&[&made], Limits { outage_ms: 20_000, ..quick() });
    let blob = bench.blob(&made).await;
    bench.store.fail(Fault::Outage, u64::MAX);
    let reading = tokio::spawn({
        let (engine, blob) = (bench.engine.clone(), blob.clone());
        async move { engine.read(&blob, 0..10).await }
    });
    let limit = Instant::now() + Duration::from_secs(20);
    while bench.store.fetches.load(Ordering::SeqCst) < 4 {
        assert!(Instant::now() < limit, "the engine does not try again");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert!(!reading.is_finished());
    bench.store.fail(Fault::None, 0);
    assert_eq!(reading.await.unwrap().unwrap(), made.part(0..10));
    assert!(blob.counts().waited_us > 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn sixty_four_readers_fetch_what_one_does() {
    let made = made();
    let bench = Bench::new(&[&made], Limits { outage_ms: 60_000, ..quick() });
    let blob = bench.blob(&made).await;
    bench.store.slow(Duration::from_millis(3));
    let size = made.index.size();
    let readers = (0..64u64).map(|reader| {
        let (engine, blob) = (bench.engine.clone(), blob.clone());
        tokio::spawn(async move {
            let mut whole = vec![0; size as usize];
            let step = 100_000;
            // Each begins elsewhere.
            for piece in 0..size.div_ceil(step) {
                let start = (piece + reader * 7) % size.div_ceil(step) * step;
                let bytes = engine.read(&blob, start..start + step).await.unwrap();
                whole[start as usize..start as usize + bytes.len()].copy_from_slice(&bytes);
            }
            whole
        })
    });
    for whole in join_all(readers).await {
        assert!(whole.unwrap() == made.plain);
    }
    let counts = blob.counts();
    assert_eq!(counts.fetched_bytes, made.stored_bytes(0..made.index.groups().len()));
    assert_eq!(counts.asked_bytes, 64 * size);
    assert!(blob.cached().is_complete());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reader_that_goes_away_takes_nobody_with_it() {
    let made = made();
    let bench = Bench::new(&[&made], quick());
    let blob = bench.blob(&made).await;
    bench.store.slow(Duration::from_millis(100));
    let (engine, its) = (bench.engine.clone(), blob.clone());
    let first = tokio::spawn(async move { engine.read(&its, 0..10).await });
    while bench.store.under_way.load(Ordering::SeqCst) == 0 {
        tokio::task::yield_now().await;
    }
    let (engine, its) = (bench.engine.clone(), blob.clone());
    let second = tokio::spawn(async move { engine.read(&its, 5..15).await });
    first.abort();
    assert_eq!(second.await.unwrap().unwrap(), made.part(5..15));
    assert_eq!(blob.counts().fetches, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn neighbours_come_in_one_fetch_and_no_fetch_is_longer_than_its_limit() {
    let made = made();
    let bench = Bench::new(&[&made], Limits { run_groups: 4, ..quick() });
    let blob = bench.blob(&made).await;
    bench.engine.ensure(&blob, 0..10 * GROUP).await.unwrap();
    assert_eq!(blob.counts().fetches, 3, "4, 4 and 2 groups");
    bench.engine.ensure(&blob, 22 * GROUP..26 * GROUP).await.unwrap();
    assert_eq!(blob.counts().fetches, 5, "a pack ends after group 23");
}

#[tokio::test(flavor = "multi_thread")]
async fn fetches_and_memory_stay_within_their_limits() {
    let made = Made::new(3, 200 * GROUP);
    let limits = Limits { fetches: 100, run_groups: 1, memory_bytes: 8 << 20, outage_ms: 60_000, ..quick() };
    // 6 MiB are for readers; a run of one group takes up to 512 KiB, and the groups that do not compress take that.
    let bench = Bench::new(&[&made], limits.clone());
    let blob = bench.blob(&made).await;
    bench.store.slow(Duration::from_millis(5));
    let reads = (0..66u64).map(|nth| bench.engine.read(&blob, nth * 3 * GROUP..nth * 3 * GROUP + 1));
    for (nth, read) in (0..).zip(join_all(reads).await) {
        assert_eq!(read.unwrap(), made.part(nth * 3 * GROUP..nth * 3 * GROUP + 1));
    }
    let most = bench.store.under_way_max.load(Ordering::SeqCst);
    assert!((2..=12).contains(&most), "{most} fetches of 512 KiB at once in 6 MiB");

    let bench = Bench::new(&[&made], Limits { fetches: 3, ..limits });
    let blob = bench.blob(&made).await;
    bench.store.slow(Duration::from_millis(2));
    join_all((0..66u64).map(|nth| bench.engine.read(&blob, nth * 3 * GROUP..nth * 3 * GROUP + 1))).await;
    assert_eq!(bench.store.under_way_max.load(Ordering::SeqCst), 3);
}

#[tokio::test(flavor = "multi_thread")]
async fn without_room_in_the_cache_reads_go_on() {
    let made = made();
    // Room for three groups, and they are pinned.
    let bench = Bench::with_budget(&[&made], quick(), 3 * GROUP + 1000);
    let blob = bench.blob(&made).await;
    blob.cached().set_mark(Mark::Pinned, true).unwrap();
    for _ in 0..2 {
        assert!(bench.engine.read(&blob, 0..made.index.size()).await.unwrap() == made.plain);
    }
    assert_eq!(blob.cached().groups_here(), 3);
    assert!(blob.counts().uncached_groups > 70, "{:?}", blob.counts());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_small_budget_holds_and_the_bytes_stay_right() {
    let (a, b) = (made(), Made::new(2, 30 * GROUP));
    let budget = 12 * GROUP;
    let bench = Bench::with_budget(&[&a, &b], quick(), budget);
    let (blob_a, blob_b) = (bench.blob(&a).await, bench.blob(&b).await);
    let reads = (0..200u64).map(|nth| {
        let (blob, made) = if nth % 2 == 0 { (&blob_a, &a) } else { (&blob_b, &b) };
        let start = nth * 7919 % 29 * GROUP + nth * 1000;
        let engine = &bench.engine;
        async move {
            assert!(
                engine.read(blob, start..start + 300_000).await.unwrap() == made.part(start..start + 300_000)
            )
        }
    });
    join_all(reads).await;
    assert!(
        bench.engine.cache().used_bytes() <= budget + 16 * GROUP,
        "{}",
        bench.engine.cache().used_bytes()
    );
    bench.engine.read(&blob_a, 0..1).await.unwrap();
    assert!(bench.engine.cache().used_bytes() <= budget);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_trace_brings_the_next_run_its_content_and_a_wrong_one_stops() {
    let made = Made::new(5, 120 * GROUP);
    let bench = Bench::new(&[&made], quick());
    let blob = bench.blob(&made).await;
    let wanted = [9u64, 3, 77, 78, 4];
    for group in wanted {
        bench.engine.read(&blob, group * GROUP..group * GROUP + 1).await.unwrap();
    }
    let order = blob.trace().order();
    assert_eq!(order.iter().map(|group| u64::from(*group)).collect::<Vec<_>>(), wanted);

    let next = Bench::new(&[&made], quick());
    let blob = next.blob(&made).await;
    let done = next.engine.prefetch(&blob, &order).await;
    assert_eq!((done.left, done.disagreed, blob.cached().groups_here()), (0, false, 5));
    assert_eq!(blob.counts().fetches, 4, "77 and 78 are neighbours");
    assert!(blob.trace().order().is_empty(), "what nobody asked for is not in a trace");
    next.engine.prefetch(&blob, &[4_000_000]).await;

    let other = Bench::new(&[&made], Limits { prefetches: 1, run_groups: 1, ..quick() });
    let blob = other.blob(&made).await;
    other.store.slow(Duration::from_millis(20));
    let (engine, its) = (other.engine.clone(), blob.clone());
    let prefetching = tokio::spawn(async move { engine.prefetch(&its, &(0..60).collect::<Vec<_>>()).await });
    while other.store.fetches.load(Ordering::SeqCst) < 2 {
        tokio::task::yield_now().await;
    }
    join_all((80..110u64).map(|group| other.engine.read(&blob, group * GROUP..group * GROUP + 1))).await;
    let done = prefetching.await.unwrap();
    assert!(done.disagreed && done.left > 0, "{done:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reader_does_not_wait_behind_prefetching() {
    let made = Made::new(6, 120 * GROUP);
    let bench = Bench::new(&[&made], Limits { prefetches: 2, run_groups: 1, outage_ms: 60_000, ..quick() });
    let blob = bench.blob(&made).await;
    bench.store.slow(Duration::from_millis(20));
    let (engine, its) = (bench.engine.clone(), blob.clone());
    let prefetching = tokio::spawn(async move { engine.prefetch(&its, &(0..100).collect::<Vec<_>>()).await });
    while bench.store.under_way.load(Ordering::SeqCst) < 2 {
        tokio::task::yield_now().await;
    }
    let last = 110 * GROUP;
    assert_eq!(bench.engine.read(&blob, last..last + 5).await.unwrap(), made.part(last..last + 5));
    assert!(blob.cached().groups_here() < 60, "the reader came after {} groups", blob.cached().groups_here());
    prefetching.abort();
}

#[tokio::test(flavor = "multi_thread")]
async fn an_index_that_is_not_the_blobs_is_refused() {
    let (made, other) = (made(), Made::new(9, GROUP));
    let bench = Bench::new(&[&made], Limits { outage_ms: 200, ..quick() });
    bench.store.fail(Fault::Corrupt, u64::MAX);
    assert!(matches!(bench.engine.blob(made.id()).await, Err(FillError::Damaged { .. })));
    bench.store.fail(Fault::None, 0);
    assert!(matches!(bench.engine.blob(other.id()).await, Err(FillError::Missing { .. })));
    bench.engine.blob(made.id()).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_blob_that_somebody_is_at_work_with_is_not_let_go_of() {
    let made = made();
    let bench = Bench::new(&[&made], quick());
    let blob = bench.engine.blob(made.id()).await.unwrap();
    assert_eq!(bench.engine.let_go(made.id()), LetGo::InUse);
    drop(blob);
    let cached = bench.engine.cache().blob(made.id()).unwrap();
    assert_eq!(bench.engine.let_go(made.id()), LetGo::InUse, "the cache gave it to somebody");
    drop(cached);
    assert_eq!(bench.engine.let_go(made.id()), LetGo::Gone);
    assert!(bench.engine.known(made.id()).unwrap().is_none());
}

#[test]
fn limits_under_which_nothing_could_be_fetched_are_refused() {
    for limits in [
        Limits { fetches: 0, ..quick() },
        Limits { memory_bytes: 1 << 20, ..quick() },
        Limits { attempt_ms: 0, ..quick() },
    ] {
        assert!(limits.check().is_err(), "{limits:?}");
        let dir = tempfile::tempdir().unwrap();
        let cache = Arc::new(Cache::open(dir.path(), 1, BOOT).unwrap());
        assert!(Engine::new(cache, support::FakeStore::of(&[]), limits).is_err());
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn any_reads_in_any_order_over_a_failing_store_are_the_content(
        reads in prop::collection::vec((0u64..11 * GROUP, 0u64..600_000), 1..40),
        fault in prop::sample::select(vec![Fault::Corrupt, Fault::Truncated, Fault::Zeros, Fault::Outage]),
        budget in prop::sample::select(vec![2 * GROUP, 5 * GROUP, 1 << 40]),
    ) {
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let made = Made::new(8, 10 * GROUP + 4096);
            let bench = Bench::with_budget(&[&made], Limits { outage_ms: 30_000, ..quick() }, budget);
            let blob = bench.blob(&made).await;
            bench.store.fail(fault, 2);
            let all = reads.iter().map(|(start, length)| bench.engine.read(&blob, *start..start + length));
            for ((start, length), bytes) in reads.iter().zip(join_all(all).await) {
                assert!(bytes.unwrap() == made.part(*start..start + length), "{start} {length}");
            }
        });
    }
}
