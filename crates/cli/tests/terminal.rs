//! `dsec shell` on a terminal of its own.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on ends here")]

mod fake;

use std::fs::File;
use std::io::{Read, Write};
use std::process::{Child, Stdio};

use fake::FakeApi;
use rustix::process::{Pid, Signal, kill_process};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{LocalModes, Winsize, tcgetattr, tcsetwinsize};

struct Terminal {
    outer: File,
    inner: File,
}

impl Terminal {
    fn new() -> Self {
        let outer = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
        grantpt(&outer).unwrap();
        unlockpt(&outer).unwrap();
        let name = ptsname(&outer, Vec::new()).unwrap().into_string().unwrap();
        let inner = File::options().read(true).write(true).open(name).unwrap();
        let terminal = Self { outer: outer.into(), inner };
        terminal.resize(40, 100);
        terminal
    }

    fn resize(&self, rows: u16, cols: u16) {
        let size = Winsize { ws_row: rows, ws_col: cols, ws_xpixel: 0, ws_ypixel: 0 };
        tcsetwinsize(&self.outer, size).unwrap();
    }

    fn run(&self, api: &FakeApi, args: &[&str]) -> Child {
        let side = || Stdio::from(self.inner.try_clone().unwrap());
        api.command(args).stdin(side()).stdout(side()).stderr(side()).spawn().unwrap()
    }

    fn local_modes(&self) -> LocalModes {
        tcgetattr(&self.inner).unwrap().local_modes
    }
}

#[test]
fn a_shell_is_raw_follows_the_size_and_leaves_the_terminal_as_it_was() {
    let (api, mut terminal) = (FakeApi::start(), Terminal::new());
    let before = terminal.local_modes();
    let mut child = terminal.run(&api, &["shell", "sb-n1-a"]);
    api.until("sized", |f| f.seen.iter().any(|s| s == "RESIZE {\"rows\":40,\"cols\":100}"));
    assert!(!terminal.local_modes().intersects(LocalModes::ECHO | LocalModes::ICANON | LocalModes::ISIG));
    terminal.resize(50, 120);
    kill_process(Pid::from_child(&child), Signal::WINCH).unwrap();
    api.until("resized", |f| f.seen.iter().any(|s| s == "RESIZE {\"rows\":50,\"cols\":120}"));
    // Ctrl-C is a key here, and the fake's shell ends with 7 at a Ctrl-D.
    terminal.outer.write_all(b"\x03x").unwrap();
    api.until("typed", |f| f.seen.iter().any(|s| s.starts_with("STDIN \u{3}")));
    terminal.outer.write_all(b"\x04").unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(7));
    assert_eq!(terminal.local_modes(), before);
    let mut echoed = [0; 3];
    terminal.outer.read_exact(&mut echoed).unwrap();
    assert_eq!(&echoed[..2], b"\x03x");
}

#[test]
fn a_session_is_left_and_lives_on() {
    let (api, mut terminal) = (FakeApi::start(), Terminal::new());
    let before = terminal.local_modes();
    let mut child = terminal.run(&api, &["shell", "sb-n1-a", "--session", "work"]);
    api.until("attached", |f| f.attached == 1);
    terminal.outer.write_all(b"~.").unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(0));
    assert!(!api.saw("SIGNAL"));
    assert_eq!(terminal.local_modes(), before);
}

#[test]
fn a_shell_whose_terminal_goes_away_takes_its_commands_along() {
    let (api, terminal) = (FakeApi::start(), Terminal::new());
    let mut child = terminal.run(&api, &["shell", "sb-n1-a"]);
    api.until("attached", |f| f.attached == 1);
    kill_process(Pid::from_child(&child), Signal::HUP).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(129));
    assert!(api.saw("SIGNAL {\"signal\":\"SIGHUP\",\"tree\":true}"));
}

#[test]
fn without_a_terminal_nothing_is_started() {
    let api = FakeApi::start();
    let ran = api.command(&["shell", "sb-n1-a"]).stdin(Stdio::null()).output().unwrap();
    assert_eq!(ran.status.code(), Some(125));
    assert!(fake::text(&ran.stderr).contains("not a terminal"));
    assert!(!api.saw("EXEC"));
}
