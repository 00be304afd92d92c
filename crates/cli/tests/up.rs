//! `dsec up` and `dsec down` with programs that only pretend: the edge is a script, the control plane
//! is this test's own executable in another role, see [`as_the_control_plane`].
//!
//! They need root, as `dsec up` does; without it they say so and pass.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on ends here")]

mod fake;

use std::io::{BufRead, BufReader};
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use fake::{FakeApi, parsed, text};
use rustix::process::{Pid, Signal, geteuid, kill_process};

const ROLE: &str = "DSEC_TEST_ROLE";
const EDGE: &str = r#"#!/bin/sh
# dsec-edge run --config FILE --ready-fd N | down --config FILE | doctor --json
state=$(sed -n 's/^state_dir = "\(.*\)"/\1/p' "$3" 2>/dev/null)
case $1 in
run)
    if [ -e "$state/edge-dies" ]; then echo "edge: no cgroups here"; exit 3; fi
    echo "edge runs" >&2
    echo run >> "$state/edge-runs"
    echo ready > "/proc/self/fd/$5"
    exec sleep 1000 ;;
down)
    echo "ended 2 of 2 sandboxes"
    [ ! -e "$state/down-fails" ] || { echo "a mount is busy"; exit 1; }
    echo down >> "$state/edge-downs" ;;
doctor)
    cat "$(dirname "$0")/features.json" ;;
esac
"#;

/// Not a test: what `dsec-control` runs.
#[test]
fn as_the_control_plane() {
    let Ok(args) = std::env::var(ROLE) else { return };
    let words: Vec<&str> = args.split(' ').collect();
    let config: toml::Value = toml::from_str(&std::fs::read_to_string(words[1]).unwrap()).unwrap();
    let _api = FakeApi::start_on(config["listen"].as_str().unwrap());
    std::fs::write(format!("/proc/self/fd/{}", words[3]), "ready\n").unwrap();
    loop {
        std::thread::park();
    }
}

struct Machine {
    dir: tempfile::TempDir,
    listen: String,
}

impl Machine {
    /// `None`, with a word, where this is not root.
    fn new() -> Option<Self> {
        if !geteuid().is_root() {
            eprintln!("not root: `dsec up` cannot be tried");
            return None;
        }
        let dir = tempfile::tempdir().unwrap();
        std::fs::set_permissions(dir.path(), PermissionsExt::from_mode(0o755)).unwrap();
        let machine = Self { dir, listen: free_address() };
        std::fs::create_dir(machine.path("bin")).unwrap();
        // A copy: the programs beside the real one are the real ones.
        install(Path::new(env!("CARGO_BIN_EXE_dsec")), Stdio::null(), &machine.path("bin/dsec"));
        machine.program("dsec-edge", EDGE);
        let me = std::env::current_exe().unwrap();
        let control = format!(
            "#!/bin/sh\n{ROLE}=\"$*\" exec {} --exact as_the_control_plane --nocapture\n",
            me.display()
        );
        machine.program("dsec-control", &control);
        Some(machine)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn state(&self, name: &str) -> PathBuf {
        self.path("state").join(name)
    }

    fn program(&self, name: &str, script: &str) {
        let text = self.path(name);
        std::fs::write(&text, script).unwrap();
        install(
            Path::new("/dev/stdin"),
            std::fs::File::open(text).unwrap().into(),
            &self.path("bin").join(name),
        );
    }

    fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(self.path("bin/dsec"));
        command.args(args).env("DSEC_CONFIG", self.path("config.toml")).env("NO_COLOR", "1");
        command.env_remove("DSEC_URL").env_remove("DSEC_API_KEY");
        command
    }

    fn up_command(&self, more: &[&str]) -> Command {
        let mut command = self.command(&["up", "--listen", &self.listen]);
        command.arg("--state-dir").arg(self.path("state")).args(more);
        command
    }

    fn up(&self) -> Output {
        self.up_command(&["--detach"]).output().unwrap()
    }

    fn down(&self) -> Output {
        self.command(&["down"]).arg("--state-dir").arg(self.path("state")).output().unwrap()
    }

    fn supervisor(&self) -> u32 {
        std::fs::read_to_string(self.state("run/up.pid")).unwrap().trim().parse().unwrap()
    }

    fn process(&self, name: &str) -> u32 {
        let json = std::fs::read(self.state("run/processes.json")).unwrap_or_default();
        let json: serde_json::Value = serde_json::from_slice(&json).unwrap_or_default();
        json[name]["pid"].as_u64().unwrap_or_default() as u32
    }

    fn lines(&self, name: &str) -> usize {
        std::fs::read_to_string(self.state(name)).unwrap_or_default().lines().count()
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        if self.path("state").exists() {
            self.down();
        }
    }
}

/// By another process: a file that this one had open for writing could be held open by a child that
/// another test starts just then, and could not be run ("text file busy").
fn install(from: &Path, stdin: Stdio, to: &Path) {
    let status = Command::new("install").args(["-m", "755"]).arg(from).arg(to).stdin(stdin).status();
    assert!(status.unwrap().success());
}

fn free_address() -> String {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string()
}

fn kill(pid: u32, signal: Signal) {
    kill_process(Pid::from_raw(pid as i32).unwrap(), signal).unwrap();
}

fn alive(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    !stat.is_empty() && !stat.contains(") Z ")
}

/// Waits on a condition of processes or files, which nobody reports.
fn until(what: &str, so: impl Fn() -> bool) {
    let start = Instant::now();
    while !so() {
        assert!(start.elapsed() < Duration::from_secs(20), "never {what}");
        std::thread::park_timeout(Duration::from_millis(5));
    }
}

#[test]
fn up_in_the_background_works_until_down_and_leaves_nothing() {
    let Some(machine) = Machine::new() else { return };
    let up = machine.up();
    assert!(up.status.success(), "{}", text(&up.stderr));
    assert!(text(&up.stdout).contains(&format!("dsec is up at http://{}", machine.listen)));
    assert!(text(&up.stderr).contains("warning: process ids: 32768; raise it"), "{}", text(&up.stderr));
    let mode = |path: PathBuf| path.metadata().unwrap().permissions().mode() & 0o777;
    assert_eq!((mode(machine.path("config.toml")), mode(machine.path("state"))), (0o600, 0o700));
    let config = std::fs::read_to_string(machine.path("config.toml")).unwrap();
    assert!(config.contains("api_key = \"dsec_"), "{config}");
    let (supervisor, edge, control) =
        (machine.supervisor(), machine.process("edge"), machine.process("control"));
    assert!(alive(supervisor) && alive(edge) && alive(control));
    assert!(std::fs::read_to_string(machine.state("log/edge.log")).unwrap().contains("edge runs"));

    let again = machine.up();
    assert_eq!(again.status.code(), Some(1));
    assert!(
        text(&again.stderr)
            .contains(&format!("already up on {} (pid {supervisor})", machine.path("state").display()))
    );

    let down = machine.down();
    assert!(down.status.success(), "{}", text(&down.stderr));
    assert!(text(&down.stderr).contains("ended 2 of 2 sandboxes"), "{}", text(&down.stderr));
    assert!(text(&down.stdout).starts_with("down: "));
    until("gone", || ![supervisor, edge, control].into_iter().any(alive));
    assert!(!machine.state("run/up.pid").exists() && !machine.state("run/processes.json").exists());
    assert_eq!((machine.lines("edge-downs"), machine.path("config.toml").exists()), (1, true));

    let nothing = machine.down();
    assert_eq!(nothing.status.code(), Some(0));
    assert!(text(&nothing.stdout).starts_with("nothing was running on "));
    assert_eq!(machine.lines("edge-downs"), 1);
}

#[test]
fn the_key_stays_when_the_platform_comes_again() {
    let Some(machine) = Machine::new() else { return };
    assert!(machine.up().status.success());
    let first = std::fs::read_to_string(machine.path("config.toml")).unwrap();
    machine.down();
    std::fs::write(machine.path("config.toml"), "url = \"http://elsewhere:1\"\napi_key = \"dsec_mine\"\n")
        .unwrap();
    let up = machine.up();
    assert_eq!(std::fs::read_to_string(machine.path("config.toml")).unwrap(), first);
    assert!(text(&up.stderr).contains("config.toml.before-up"), "{}", text(&up.stderr));
    assert!(std::fs::read_to_string(machine.path("config.toml.before-up")).unwrap().contains("elsewhere"));
}

#[test]
fn down_where_nothing_ever_ran_says_so() {
    let Some(machine) = Machine::new() else { return };
    let down = machine.down();
    assert_eq!(down.status.code(), Some(0));
    assert!(text(&down.stdout).starts_with("nothing was running on "));
    assert!(!machine.path("state").exists());
}

#[test]
fn a_program_that_dies_is_started_again() {
    let Some(machine) = Machine::new() else { return };
    assert!(machine.up().status.success());
    for name in ["edge", "control"] {
        let before = machine.process(name);
        kill(before, Signal::KILL);
        until("started again", || ![0, before].contains(&machine.process(name)));
    }
    until("noted", || {
        let log = std::fs::read_to_string(machine.state("log/up.log")).unwrap();
        log.contains("edge ended (signal 9)") && log.contains("control runs again")
    });
    assert!(machine.down().status.success());
}

#[test]
fn down_works_when_the_supervisor_was_killed() {
    let Some(machine) = Machine::new() else { return };
    assert!(machine.up().status.success());
    let (edge, control) = (machine.process("edge"), machine.process("control"));
    let supervisor = machine.supervisor();
    kill(supervisor, Signal::KILL);
    until("killed", || !alive(supervisor));
    assert!(alive(edge) && alive(control));
    std::fs::write(machine.state("down-fails"), "").unwrap();
    let failed = machine.down();
    assert_eq!(failed.status.code(), Some(1));
    assert!(
        text(&failed.stderr).contains("a mount is busy")
            && text(&failed.stderr).contains("run `dsec down` again")
    );
    std::fs::remove_file(machine.state("down-fails")).unwrap();
    let down = machine.down();
    assert!(down.status.success(), "{}", text(&down.stderr));
    until("gone", || !alive(edge) && !alive(control));
    assert!(text(&machine.down().stdout).starts_with("nothing was running"));
}

#[test]
fn up_takes_over_from_a_supervisor_that_was_killed_and_ends_no_sandbox() {
    let Some(machine) = Machine::new() else { return };
    assert!(machine.up().status.success());
    let (edge, supervisor) = (machine.process("edge"), machine.supervisor());
    kill(supervisor, Signal::KILL);
    until("killed", || !alive(supervisor));
    let up = machine.up();
    assert!(up.status.success(), "{}", text(&up.stderr));
    assert!(!alive(edge) && alive(machine.process("edge")));
    assert_eq!((machine.lines("edge-runs"), machine.lines("edge-downs")), (2, 0));
}

#[test]
fn a_program_that_dies_at_its_start_shows_its_last_words() {
    let Some(machine) = Machine::new() else { return };
    std::fs::create_dir(machine.path("state")).unwrap();
    std::fs::write(machine.state("edge-dies"), "").unwrap();
    for more in [&["--detach"][..], &[]] {
        let up = machine.up_command(more).output().unwrap();
        assert_eq!(up.status.code(), Some(1));
        let said = text(&up.stderr);
        assert!(said.contains("edge ended at its start: exit code 3:\n  edge: no cgroups here\n"), "{said}");
        assert!(!machine.state("run/processes.json").exists());
    }
    assert!(text(&machine.down().stdout).starts_with("nothing was running"));
}

#[test]
fn a_port_in_use_is_named_before_anything_is_made() {
    let Some(machine) = Machine::new() else { return };
    let _holder = TcpListener::bind(&machine.listen).unwrap();
    for more in [&["--detach"][..], &[]] {
        let up = machine.up_command(more).output().unwrap();
        assert_eq!(up.status.code(), Some(1));
        assert!(
            text(&up.stderr).contains(&format!("error: {} is in use", machine.listen)),
            "{}",
            text(&up.stderr)
        );
    }
    assert!(!machine.path("state").exists() && !machine.path("config.toml").exists());
}

#[test]
fn in_the_foreground_a_ctrl_c_takes_it_down() {
    let Some(machine) = Machine::new() else { return };
    for signal in [Signal::INT, Signal::TERM] {
        let mut command = machine.up_command(&[]);
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
        assert!(line.starts_with("dsec is up at "), "{line}");
        let (edge, control) = (machine.process("edge"), machine.process("control"));
        kill(child.id(), signal);
        let ended = child.wait_with_output().unwrap();
        let said = text(&ended.stderr);
        assert_eq!(ended.status.code(), Some(0), "{said}");
        assert!(said.contains("edge | edge runs") && said.contains("ended 2 of 2"), "{said}");
        assert!(!alive(edge) && !alive(control));
    }
    assert_eq!(machine.lines("edge-downs"), 2);
}

#[test]
fn who_is_not_root_is_told_so() {
    let Some(machine) = Machine::new() else { return };
    for command in ["up", "down"] {
        let ran = Command::new("setpriv")
            .args(["--reuid", "65534", "--regid", "65534", "--clear-groups"])
            .arg(machine.path("bin/dsec"))
            .arg(command)
            .output()
            .unwrap();
        assert_eq!(ran.status.code(), Some(1));
        let said = text(&ran.stderr);
        assert!(said.starts_with(&format!("error: dsec {command} needs root")), "{said}");
        assert!(said.contains("hint: run it with sudo"));
    }
}

#[test]
fn a_full_disk_is_named_before_anything_is_started() {
    let Some(machine) = Machine::new() else { return };
    let state = machine.path("state");
    std::fs::create_dir(&state).unwrap();
    let script = "mount -t tmpfs -o size=1m none \"$1\" && shift && exec \"$@\"";
    let up = machine.up_command(&["--detach"]);
    let ran = Command::new("unshare")
        .args(["--mount", "--propagation", "private", "sh", "-c", script, "sh"])
        .arg(&state)
        .arg(up.get_program())
        .args(up.get_args())
        .env("DSEC_CONFIG", machine.path("config.toml"))
        .output()
        .unwrap();
    assert_eq!(ran.status.code(), Some(1));
    let said = text(&ran.stderr);
    assert!(said.contains(&format!("error: the disk of {} is full", state.display())), "{said}");
    assert!(said.contains("hint: free some space"));
}

#[test]
fn missing_programs_are_named() {
    let Some(machine) = Machine::new() else { return };
    std::fs::remove_file(machine.path("bin/dsec-control")).unwrap();
    let ran = machine.up_command(&[]).env("PATH", "/nonexistent").output().unwrap();
    assert!(text(&ran.stderr).contains("the program dsec-control is neither in"), "{}", text(&ran.stderr));
    assert!(!Path::new(&machine.path("state")).exists());
}

#[test]
fn doctor_fails_when_something_needed_is_missing() {
    let Some(machine) = Machine::new() else { return };
    let feature = |state: &str| serde_json::json!([{ "name": "erofs", "purpose": "layers", "state": state, "found": "mounted one", "remedy": "load it" }]);
    for (state, code) in [("works", 0), ("degraded", 0), ("missing", 1)] {
        std::fs::write(machine.path("bin/features.json"), feature(state).to_string()).unwrap();
        let ran = machine.command(&["doctor"]).output().unwrap();
        assert_eq!(ran.status.code(), Some(code));
        let shown = text(&ran.stdout);
        assert!(
            shown.starts_with("FEATURE") && shown.contains(state) && shown.contains("load it"),
            "{shown}"
        );
        assert_eq!(parsed(&machine.command(&["doctor", "--json"]).output().unwrap()), feature(state));
    }
    std::fs::write(machine.path("bin/features.json"), "no json").unwrap();
    let ran = machine.command(&["doctor"]).output().unwrap();
    assert!(ran.status.code() == Some(1) && text(&ran.stderr).contains("gave no list of features"));
}
