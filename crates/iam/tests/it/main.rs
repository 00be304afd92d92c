//! The same scenarios on SQLite and on a real PostgreSQL.
#![allow(unreachable_pub, reason = "one test binary; its modules see each other")]
#![allow(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

mod postgres;
mod scenarios;

use postgres::Postgres;
use scenarios::{Place, alone, shared};

#[tokio::test(flavor = "multi_thread")]
async fn sqlite() {
    let directory = tempfile::tempdir().unwrap();
    for (name, scenario) in alone() {
        let path = directory.path().join(format!("{name}.db"));
        eprintln!("{name}");
        scenario(Place { url: format!("sqlite:{}", path.display()) }).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn postgresql() {
    let server = Postgres::start();
    for (name, scenario) in alone().into_iter().chain(shared()) {
        eprintln!("{name}");
        scenario(Place { url: server.database(name) }).await;
    }
}

#[tokio::test]
async fn a_file_is_one_servers() {
    use std::os::unix::fs::PermissionsExt;
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("iam.db");
    let url = format!("sqlite:{}", path.display());
    let first = dsec_iam::Iam::open(&url).await.unwrap();
    assert_eq!(path.metadata().unwrap().permissions().mode() & 0o777, 0o600);
    let second = dsec_iam::Iam::open(&url).await.unwrap_err().to_string();
    assert!(second.contains("another dsec-control"), "{second}");
    drop(first);
    dsec_iam::Iam::open(&url).await.unwrap();
    let nowhere = dsec_iam::Iam::open("postgres://u:secret@127.0.0.1:1/x").await.unwrap_err().to_string();
    assert!(nowhere.contains("127.0.0.1:1") && !nowhere.contains("secret"), "{nowhere}");
    let odd = dsec_iam::Iam::open("mysql://h/x").await.unwrap_err().to_string();
    assert!(odd.contains("mysql://h/x"), "{odd}");
}
