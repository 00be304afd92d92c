//! The program itself: flags, readiness, signals.

use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Command, Output, Stdio};

use crate::harness::{KEY, key_line, write_keys};

const PROGRAM: &str = env!("CARGO_BIN_EXE_dsec-control");

fn run(args: &[&str]) -> Output {
    Command::new(PROGRAM).args(args).env_remove("DSEC_LOG").output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

fn config(dir: &Path) -> String {
    let keys = dir.join("keys.json");
    write_keys(&keys, &[key_line("key-1", KEY)]);
    let path = dir.join("control.toml");
    let (keys, socket) = (keys.display(), dir.join("edge.sock"));
    let text = format!(
        "listen = \"127.0.0.1:0\"\nkeys_file = \"{keys}\"\nnodes = [{{ name = \"n1\", socket = {socket:?} }}]\n"
    );
    std::fs::write(&path, text).unwrap();
    path.display().to_string()
}

#[test]
fn check_prints_the_settings_in_force() {
    let dir = tempfile::tempdir().unwrap();
    let path = config(dir.path());
    let output = run(&["--config", &path, "--listen", "127.0.0.1:9", "--node", "n7=/run/e.sock", "--check"]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let printed = text(&output.stdout);
    assert!(printed.contains("listen = \"127.0.0.1:9\""), "{printed}");
    assert!(printed.contains("name = \"n7\"") && !printed.contains("n1"), "{printed}");
}

#[test]
fn a_mistake_is_named_once_and_exits_with_1() {
    let dir = tempfile::tempdir().unwrap();
    let path = config(dir.path());
    let broken = std::fs::read_to_string(&path).unwrap().replace("keys_file", "key_file");
    std::fs::write(&path, broken).unwrap();
    let output = run(&["--config", &path]);
    assert_eq!(output.status.code(), Some(1));
    assert!(output.stdout.is_empty());
    let message = text(&output.stderr);
    assert!(message.contains("control.toml") && message.contains("key_file"), "{message}");
}

#[test]
fn it_says_when_it_is_ready_and_ends_well_when_asked_to() {
    let dir = tempfile::tempdir().unwrap();
    let path = config(dir.path());
    for signal in ["TERM", "INT"] {
        // The shell makes descriptor 3 a copy of the pipe and leaves the program no other.
        let script = format!("exec {PROGRAM} --config {path} --log-format json --ready-fd 3 3>&1 1>&2");
        let mut child = Command::new("sh")
            .args(["-c", &script])
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut pipe = BufReader::new(child.stdout.take().unwrap());
        let mut line = String::new();
        pipe.read_line(&mut line).unwrap();
        let address: std::net::SocketAddr = line.trim_end().parse().unwrap();
        assert_ne!(address.port(), 0);
        let mut rest = Vec::new();
        pipe.read_to_end(&mut rest).unwrap();
        assert!(rest.is_empty(), "the pipe was not closed after one line");

        let idle = std::net::TcpStream::connect(address).unwrap();
        let killed = Command::new("kill").args(["-s", signal, &child.id().to_string()]).status().unwrap();
        assert!(killed.success());
        let output = child.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
        for line in text(&output.stderr).lines() {
            let line: serde_json::Value = serde_json::from_str(line).unwrap();
            assert_eq!(line["level"], "INFO", "{line}");
        }
        drop(idle);
    }
}

#[test]
fn the_document_can_be_printed() {
    let output = run(&["--print-openapi"]);
    assert_eq!(text(&output.stdout), dsec_control::openapi::document());
}
