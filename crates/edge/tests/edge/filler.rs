//! The fill holder as the edge keeps it: a fake one, so that neither root nor a kernel is needed.

use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use dsec_edge::layers::{Content as _, Filler};
use dsec_fill::engine::Counts;
use dsec_fill::protocol::Stats;
use dsec_store::StoreSettings;
use rustix::process::{Pid, Signal, kill_process};

use crate::support::until;

/// Serves the control socket of its configuration and writes down who it is; ends at once while there are failures left.
const HOLDER: &str = r#"#!/usr/bin/env python3
import json, os, pathlib, signal, socket, sys, tomllib
signal.signal(signal.SIGHUP, lambda *_: (here / "replaced").touch())
config = tomllib.loads(pathlib.Path(sys.argv[3]).read_text())
here = pathlib.Path(__file__).parent
failures = here / "failures"
left = int(failures.read_text()) if failures.exists() else 0
if left:
    failures.write_text(str(left - 1))
    sys.exit(3)
path = pathlib.Path(config["socket"])
path.unlink(missing_ok=True)
served = socket.socket(socket.AF_UNIX)
served.bind(str(path))
served.listen()
with (here / "pids").open("a") as pids:
    pids.write(f"{os.getpid()}\n")
while True:
    client, _ = served.accept()
    line = client.makefile("rb").readline()
    if not line:
        continue
    request = json.loads(line)
    stats = json.loads((here / "stats.json").read_text()) | {"worker_pid": os.getpid()}
    answer = {"stats": stats} if request["op"] == "stats" else "done"
    client.sendall(json.dumps(answer).encode() + b"\n")
    client.close()
    if request["op"] == "shutdown":
        path.unlink()
        sys.exit(0)
"#;

struct World {
    dir: tempfile::TempDir,
}

impl World {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let program = dir.path().join("holder");
        let stats = Stats { worker_pid: 0, used_bytes: 0, known_blobs: 0, counts: Counts::default() };
        std::fs::write(dir.path().join("stats.json"), serde_json::to_vec(&stats).unwrap()).unwrap();
        std::fs::write(&program, HOLDER).unwrap();
        std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
        Self { dir }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    async fn start(&self) -> Arc<Filler> {
        Arc::new(self.start_with("store", 1 << 30).await.unwrap())
    }

    async fn start_with(&self, store: &str, cache_bytes: u64) -> std::io::Result<Filler> {
        let (program, state) = (self.path("holder"), self.path("state"));
        let store = StoreSettings::new(self.path(store).display().to_string());
        let start = move || Filler::start(&program, &state, &store, cache_bytes);
        tokio::task::spawn_blocking(start).await.unwrap()
    }

    fn pids(&self) -> Vec<i32> {
        let text = std::fs::read_to_string(self.path("pids")).unwrap();
        text.lines().map(|line| line.parse().unwrap()).collect()
    }

    fn kill_last(&self) {
        kill_process(Pid::from_raw(*self.pids().last().unwrap()).unwrap(), Signal::KILL).unwrap();
    }
}

impl Drop for World {
    fn drop(&mut self) {
        for pid in self.pids() {
            // Ours only: another process may have the number by now.
            let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            if String::from_utf8_lossy(&line).contains(&*self.dir.path().to_string_lossy()) {
                let _ = kill_process(Pid::from_raw(pid).unwrap(), Signal::KILL);
            }
        }
    }
}

async fn generation(filler: &Filler, wanted: u64) {
    until("a new holder", || match filler.generation() {
        found if found == wanted => Ok(()),
        found => Err(found),
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_holder_that_dies_is_started_again_and_one_that_is_ended_is_not() {
    let world = World::new();
    let filler = world.start().await;
    assert_eq!(filler.generation(), 1);
    let supervised = tokio::spawn(Arc::clone(&filler).supervise());
    world.kill_last();
    generation(&filler, 2).await;
    assert_eq!(filler.stats().await.unwrap().worker_pid as i32, world.pids()[1]);
    // One that does not come up is tried again.
    std::fs::write(world.path("failures"), "3").unwrap();
    world.kill_last();
    // A call that is made while there is none waits for the next.
    assert_eq!(filler.stats().await.unwrap().worker_pid as i32, *world.pids().last().unwrap());
    generation(&filler, 3).await;
    assert_eq!(std::fs::read_to_string(world.path("failures")).unwrap(), "0");
    filler.shut_down().await.unwrap();
    supervised.await.unwrap();
    assert_eq!(world.pids().len(), 3);
    assert!(!Path::new(&format!("/proc/{}", world.pids()[2])).exists() || is_zombie(world.pids()[2]));
}

fn is_zombie(pid: i32) -> bool {
    std::fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| stat.contains(") Z "))
}

#[tokio::test(flavor = "multi_thread")]
async fn the_holder_of_an_earlier_edge_is_found_and_watched() {
    let world = World::new();
    drop(world.start().await);
    let filler = world.start().await;
    assert_eq!((filler.generation(), world.pids().len()), (0, 1));
    let supervised = tokio::spawn(Arc::clone(&filler).supervise());
    world.kill_last();
    generation(&filler, 1).await;
    assert_eq!(world.pids().len(), 2);
    filler.shut_down().await.unwrap();
    supervised.await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn changed_settings_come_to_the_holder_of_an_earlier_edge_but_not_another_store() {
    let world = World::new();
    drop(world.start().await);
    let config = world.path("state/run/fill.toml");
    let before = std::fs::read_to_string(&config).unwrap();
    drop(world.start().await);
    assert!(!world.path("replaced").exists(), "nothing has changed");
    drop(world.start_with("store", 2 << 30).await.unwrap());
    assert!(std::fs::read_to_string(&config).unwrap().contains("cache_bytes = 2147483648"));
    assert_eq!(std::fs::metadata(&config).unwrap().permissions().mode() & 0o777, 0o600);
    until("a new worker", || if world.path("replaced").exists() { Ok(()) } else { Err("no signal yet") })
        .await;
    let error = world.start_with("other", 1 << 30).await.err().unwrap();
    assert!(error.to_string().contains("dsec down"), "{error}");
    assert_ne!(std::fs::read_to_string(&config).unwrap(), before, "the refused settings were not written");
    assert_eq!(world.pids().len(), 1);
}
