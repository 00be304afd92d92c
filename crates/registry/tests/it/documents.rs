//! Finding an image: documents, platforms, credentials, references to elsewhere. Against a fake registry.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use super::support::{Answer, Asked, BORNE_MAX, Fake, INDEX, MANIFEST, Served, descriptor};
use dsec_registry::{Allowed, Credentials, Digest, Limits, Platform, PullError, Settings};
use serde_json::json;

fn amd64() -> Platform {
    "linux/amd64".parse().unwrap()
}

fn image() -> Served {
    Served::new(&[b"below", b"above"], "amd64")
}

fn password() -> Option<Credentials> {
    Some(Credentials::Password { user: "ann".to_owned(), password: "secret".to_owned() })
}

async fn find(fake: &Fake, settings: Settings) -> Result<dsec_registry::Image, PullError> {
    fake.client(settings).image(&fake.reference("team/app:1"), &amd64()).await
}

#[tokio::test]
async fn an_image_is_found_with_its_configuration_and_layers() {
    let fake = Fake::with_image(image()).await;
    let found = find(&fake, Settings::default()).await.unwrap();
    assert_eq!(found.digest, Digest::of(&image().manifest));
    assert_eq!(found.config.config.env, ["A=b"]);
    let sizes: Vec<_> = found.layers.iter().map(|layer| (layer.digest, layer.size)).collect();
    assert_eq!(sizes, [(Digest::of(b"below"), 5), (Digest::of(b"above"), 5)]);
    assert_eq!(found.layers[1].diff_id, Digest::of(b"above").to_string());
    assert!(fake.asked()[0].header("accept").is_some_and(|accept| accept == INDEX), "{:?}", fake.asked()[0]);
    // By digest it is the same; another digest is not believed.
    let reference = fake.reference(&format!("team/app@{}", found.digest));
    assert_eq!(
        fake.client(Settings::default()).image(&reference, &amd64()).await.unwrap().layers,
        found.layers
    );
}

#[tokio::test]
async fn a_document_is_not_believed_before_its_digest_is_right() {
    let other = Served::new(&[b"other"], "amd64");
    let wanted = Digest::of(&image().manifest);
    let fake =
        Fake::start(move |_| Answer::new(200, other.manifest.clone()).with("content-type", MANIFEST)).await;
    let reference = fake.reference(&format!("team/app@{wanted}"));
    let error = fake.client(Settings::default()).image(&reference, &amd64()).await.unwrap_err();
    assert!(matches!(error, PullError::DigestMismatch { what, .. } if what == wanted), "{error}");
    // What a registry says of a tag binds it too.
    let served = image();
    let fake = Fake::start(move |asked| {
        let answer = served.answer(asked);
        if asked.path.contains("/manifests/") {
            answer.with("docker-content-digest", Digest::of(b"").to_string())
        } else {
            answer
        }
    })
    .await;
    let error = find(&fake, Settings::default()).await.unwrap_err();
    assert!(matches!(error, PullError::DigestMismatch { .. }), "{error}");
    // And the configuration.
    let served = image();
    let fake = Fake::start(move |asked| match asked.path.contains("/blobs/") {
        true => Answer::new(200, "{}"),
        false => served.answer(asked),
    })
    .await;
    let error = find(&fake, Settings::default()).await.unwrap_err();
    assert!(matches!(error, PullError::DigestMismatch { .. }), "{error}");
}

#[tokio::test]
async fn the_platforms_image_is_found_in_indexes_of_indexes() {
    let (amd, arm) = (image(), Served::new(&[b"arm"], "arm64"));
    let entry = |served: &Served, architecture: &str| {
        let mut entry = descriptor(MANIFEST, &served.manifest);
        entry["platform"] = json!({ "os": "linux", "architecture": architecture });
        entry
    };
    let inner =
        json!({ "schemaVersion": 2, "manifests": [entry(&arm, "arm64"), entry(&amd, "amd64")] }).to_string();
    let outer = json!({ "schemaVersion": 2, "manifests": [descriptor(INDEX, inner.as_bytes())] }).to_string();
    let fake = Fake::start(move |asked| {
        let document = |text: &str| Answer::new(200, text).with("content-type", INDEX);
        match asked.path.rsplit('/').next().unwrap_or_default() {
            "1" => document(&outer),
            digest if digest == Digest::of(inner.as_bytes()).to_string() => document(&inner),
            _ if amd.answer(asked).is(404) => arm.answer(asked),
            _ => amd.answer(asked),
        }
    })
    .await;
    let client = fake.client(Settings::default());
    let reference = fake.reference("team/app:1");
    assert_eq!(client.image(&reference, &amd64()).await.unwrap().layers.len(), 2);
    assert_eq!(client.image(&reference, &"linux/arm64".parse().unwrap()).await.unwrap().layers.len(), 1);
    let error = client.image(&reference, &"linux/s390x".parse().unwrap()).await.unwrap_err();
    assert!(error.to_string().contains("it has: linux/arm64, linux/amd64"), "{error}");
}

#[tokio::test]
async fn an_image_for_another_platform_is_refused_by_its_configuration() {
    let fake = Fake::with_image(Served::new(&[b"arm"], "arm64")).await;
    let error = find(&fake, Settings::default()).await.unwrap_err();
    assert!(matches!(error, PullError::NoPlatform { .. }), "{error}");
    assert!(error.to_string().contains("it has: linux/arm64"), "{error}");
}

#[tokio::test]
async fn an_image_that_contradicts_itself_is_refused() {
    let config = json!({ "architecture": "amd64", "os": "linux", "rootfs": { "diff_ids": [] } }).to_string();
    let fake = Fake::with_image(Served::with_config(&[b"one"], config.as_bytes())).await;
    let error = find(&fake, Settings::default()).await.unwrap_err().to_string();
    assert!(error.contains("1 layers and its configuration 0 diff ids"), "{error}");
    let config = json!({ "architecture": "amd64", "rootfs": { "diff_ids": ["md5:0"] } }).to_string();
    let fake = Fake::with_image(Served::with_config(&[b"one"], config.as_bytes())).await;
    assert!(matches!(find(&fake, Settings::default()).await, Err(PullError::Config(_))));
}

#[tokio::test]
async fn limits_hold_before_anything_is_fetched() {
    let fake = Fake::with_image(image()).await;
    let small = Limits::default();
    for (limits, what) in [
        (Limits { document_bytes: 100, ..small }, "image team/app:1"),
        (Limits { config_bytes: 10, ..small }, "configuration sha256:"),
        (Limits { layers: 1, ..small }, "manifest sha256:"),
        (Limits { total_bytes: 9, ..small }, "the image's layers"),
    ] {
        let error = find(&fake, Settings { limits, ..Settings::default() }).await.unwrap_err();
        assert!(
            matches!(&error, PullError::TooLarge { what: found, .. } if found.starts_with(what)),
            "{error}"
        );
        if what.starts_with("configuration") {
            let is_asked = fake.asked().iter().any(|asked| asked.path.contains("/blobs/"));
            assert!(!is_asked, "it was fetched before its size was looked at");
        }
    }
}

#[tokio::test]
async fn a_registry_that_does_not_say_all_of_a_document_is_given_up() {
    let limits = Limits { stall: Duration::from_millis(50), tries: 2, ..Limits::default() };
    let manifest = image().manifest;
    let in_the_midst = Answer::new(200, manifest).with("content-type", MANIFEST).hang(10);
    for answer in [Answer::silent(), in_the_midst] {
        let fake = Fake::start(move |_| answer.clone()).await;
        let finding = find(&fake, Settings { limits, ..Settings::default() });
        let found = tokio::time::timeout(BORNE_MAX, finding).await.expect("it was not given up");
        let error = found.unwrap_err();
        assert!(matches!(error, PullError::Stalled { .. }), "{error}");
        assert_eq!(fake.asked().len(), 2);
    }
}

#[tokio::test]
async fn what_is_not_there_or_no_registry_is_said_to_be() {
    let fake = Fake::start(|_| Answer::new(404, r#"{"errors":[{"code":"X","message":"the inside"}]}"#)).await;
    let error = find(&fake, Settings::default()).await.unwrap_err();
    assert!(matches!(error, PullError::NotFound { .. }), "{error}");
    assert!(
        error.to_string().contains("image team/app:1") && !error.to_string().contains("inside"),
        "{error}"
    );
    assert_eq!(fake.asked().len(), 1, "it was asked again");
    let fake =
        Fake::start(|_| Answer::new(200, "<html>the inside</html>").with("content-type", "text/html")).await;
    let error = find(&fake, Settings::default()).await.unwrap_err();
    assert!(matches!(error, PullError::BadDocument { .. }), "{error}");
}

#[tokio::test]
async fn a_closed_port_is_unreachable() {
    let free = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap();
    let reference = format!("docker://{free}/team/app:1").parse().unwrap();
    let limits = Limits { pause: Duration::from_millis(1), tries: 2, ..Limits::default() };
    let settings = Settings { limits, ..Settings::default() };
    let client = dsec_registry::Client::new(&reference, &settings).unwrap();
    let error = client.image(&reference, &amd64()).await.unwrap_err();
    assert!(matches!(&error, PullError::Unreachable { host, .. } if *host == free.to_string()), "{error}");
}

#[tokio::test]
async fn a_registry_that_is_busy_is_asked_again() {
    let tries = AtomicU32::new(0);
    let served = image();
    let fake = Fake::start(move |asked| match tries.fetch_add(1, Ordering::Relaxed) {
        0 => Answer::new(429, "").with("retry-after", "0"),
        1 => Answer::new(503, ""),
        2 => served.answer(asked).cut(10),
        _ => served.answer(asked),
    })
    .await;
    find(&fake, Settings::default()).await.unwrap();
    let tries = AtomicU32::new(0);
    let fake = Fake::start(move |_| match tries.fetch_add(1, Ordering::Relaxed) {
        0..20 => Answer::new(503, ""),
        _ => Answer::new(404, ""),
    })
    .await;
    let error = find(&fake, Settings::default()).await.unwrap_err();
    assert!(matches!(error, PullError::Status { status: 503, .. }), "{error}");
    assert_eq!(fake.asked().len(), Limits::default().tries as usize);
}

#[tokio::test]
async fn a_registry_does_not_say_how_long_it_is_waited_for() {
    let tries = AtomicU32::new(0);
    let served = image();
    let fake = Fake::start(move |asked| match tries.fetch_add(1, Ordering::Relaxed) {
        0 => Answer::new(429, "").with("retry-after", "86400"),
        _ => served.answer(asked),
    })
    .await;
    let limits = Limits { pause_max: Duration::from_millis(10), ..Limits::default() };
    let finding = find(&fake, Settings { limits, ..Settings::default() });
    tokio::time::timeout(BORNE_MAX, finding).await.expect("it waits as long as the registry says").unwrap();
}

fn wants_basic(served: Served) -> impl Fn(&Asked) -> Answer {
    move |asked| match asked.header("authorization") {
        // ann:secret
        Some("Basic YW5uOnNlY3JldA==") => served.answer(asked),
        _ => Answer::new(401, "").with("www-authenticate", r#"Basic realm="x""#),
    }
}

#[tokio::test]
async fn a_password_is_shown_when_it_is_asked_for() {
    let fake = Fake::start(wants_basic(image())).await;
    let settings = Settings { credentials: password(), ..Settings::default() };
    find(&fake, settings).await.unwrap();
    let shown: Vec<bool> = fake.asked().iter().map(|asked| asked.header("authorization").is_some()).collect();
    assert_eq!(shown, [false, true, true], "once it was asked for it is sent at once");
    let without = find(&fake, Settings::default()).await.unwrap_err();
    assert!(matches!(without, PullError::Unauthorized { with_credentials: false, .. }), "{without}");
    let other = Some(Credentials::Password { user: "ann".to_owned(), password: "wrong".to_owned() });
    let wrong = find(&fake, Settings { credentials: other, ..Settings::default() }).await.unwrap_err();
    assert!(matches!(wrong, PullError::Unauthorized { with_credentials: true, .. }), "{wrong}");
    assert!(!format!("{wrong} {wrong:?}").contains("wrong"), "{wrong}");
}

/// A registry that wants a token, and the service that gives it, on ports of their own.
async fn with_tokens(identity: bool) -> (Fake, Fake) {
    let service = Fake::start(move |asked| {
        let is_ann = match identity {
            true => asked.method == "POST" && asked.body.contains("refresh_token=identity"),
            false => asked.header("authorization") == Some("Basic YW5uOnNlY3JldA=="),
        };
        if is_ann {
            Answer::new(200, r#"{"access_token":"T","expires_in":60}"#)
        } else {
            Answer::new(401, "")
        }
    })
    .await;
    let (served, realm) = (image(), service.address);
    let registry = Fake::start(move |asked| match asked.header("authorization") {
        Some("Bearer T") => served.answer(asked),
        _ => Answer::new(401, "").with(
            "www-authenticate",
            format!(r#"Bearer realm="http://{realm}/token",service="s",scope="repository:team/app:pull""#),
        ),
    })
    .await;
    (registry, service)
}

#[tokio::test]
async fn a_token_is_got_from_the_service_that_the_registry_names() {
    let (registry, service) = with_tokens(false).await;
    find(&registry, Settings { credentials: password(), ..Settings::default() }).await.unwrap();
    let asked = service.asked();
    assert_eq!(asked.len(), 1, "one token is enough");
    assert_eq!(asked[0].path, "/token?service=s&scope=repository%3Ateam%2Fapp%3Apull&account=ann");
    assert!(
        registry
            .asked()
            .iter()
            .all(|asked| asked.header("authorization").is_none_or(|value| value == "Bearer T"))
    );
    let error = find(&registry, Settings::default()).await.unwrap_err();
    assert!(
        matches!(&error, PullError::Unauthorized { host, .. } if *host == service.address.to_string()),
        "{error}"
    );
    let (registry, _service) = with_tokens(true).await;
    let credentials = Some(Credentials::IdentityToken("identity".to_owned()));
    find(&registry, Settings { credentials, ..Settings::default() }).await.unwrap();
    let credentials = Some(Credentials::RegistryToken("T".to_owned()));
    find(&registry, Settings { credentials, ..Settings::default() }).await.unwrap();
}

#[tokio::test]
async fn nothing_that_proves_who_we_are_follows_a_reference_to_elsewhere() {
    let served = image();
    let elsewhere = Fake::with_image(served.clone()).await;
    let (there, wants) = (elsewhere.address, wants_basic(served));
    let fake = Fake::start(move |asked| {
        let answer = wants(asked);
        if answer.is(401) || !asked.path.contains("/blobs/") {
            return answer;
        }
        Answer::new(307, "").with("location", format!("http://user:pass@{there}{}", asked.path))
    })
    .await;
    find(&fake, Settings { credentials: password(), ..Settings::default() }).await.unwrap();
    let asked = elsewhere.asked();
    assert_eq!(asked.len(), 1);
    assert_eq!(asked[0].header("authorization"), None);
}

#[tokio::test]
async fn references_to_where_no_registry_is_are_not_followed() {
    for (location, word) in [
        ("http://169.254.169.254/latest/meta-data", "169.254.169.254"),
        ("http://[fe80::1]/x", "fe80::1"),
        ("http://[::ffff:169.254.169.254]/x", "a9fe"),
        ("ftp://127.0.0.1/x", "ftp"),
        ("file:///etc/passwd", "file"),
        ("/v2/team/app/manifests/again", "more than 5 times"),
    ] {
        let fake = Fake::start(move |_| Answer::new(302, "").with("location", location)).await;
        let error = find(&fake, Settings::default()).await.unwrap_err();
        let is_kind = matches!(error, PullError::Refused(_) | PullError::Strange { .. });
        assert!(is_kind && error.to_string().contains(word), "{location}: {error}");
        let challenge = format!(r#"Bearer realm="{location}""#);
        let fake =
            Fake::start(move |_| Answer::new(401, "").with("www-authenticate", challenge.clone())).await;
        let error = find(&fake, Settings::default()).await.unwrap_err();
        let is_kind = matches!(
            error,
            PullError::Refused(_) | PullError::Strange { .. } | PullError::Unauthorized { .. }
        );
        assert!(is_kind, "{location}: {error}");
    }
}

#[tokio::test]
async fn only_listed_registries_are_connected_to() {
    let fake = Fake::with_image(image()).await;
    let list = |pattern: &str| Settings {
        allowed: Allowed::only(vec![pattern.parse().unwrap()]),
        ..Settings::default()
    };
    find(&fake, list("127.0.0.1")).await.unwrap();
    find(&fake, list(&fake.address.to_string())).await.unwrap();
    let before = fake.asked().len();
    for other in ["registry.example", "127.0.0.1:1", "*.example"] {
        let error = find(&fake, list(other)).await.unwrap_err();
        assert!(matches!(error, PullError::Refused(_)), "{other}: {error}");
    }
    assert_eq!(fake.asked().len(), before, "it was connected to");
}

#[tokio::test]
async fn tls_is_spoken_where_certificates_are_given() {
    let fake = Fake::with_image(image()).await;
    let settings = Settings { ca_pem: Some(CERTIFICATE.to_owned()), ..Settings::default() };
    let error = find(&fake, settings).await.unwrap_err();
    assert!(matches!(error, PullError::Tls { .. }), "{error}");
    for pem in ["", "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"] {
        let settings = Settings { ca_pem: Some(pem.to_owned()), ..Settings::default() };
        let error = dsec_registry::Client::new(&fake.reference("team/app:1"), &settings).unwrap_err();
        assert!(matches!(error, PullError::BadCertificates { .. }), "{error}");
    }
}

/// A certificate of nobody's, of an elliptic curve; valid for a hundred years.
const CERTIFICATE: &str = include_str!("nobody.pem");
