//! The commands as people run them, against a platform of nothing but its API.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on ends here")]

mod fake;

use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::process::Stdio;

use fake::{FakeApi, parsed, text};
use rustix::process::{Pid, Signal, kill_process};

fn with_stdin(mut command: std::process::Command, input: &[u8]) -> std::process::Output {
    let mut child =
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    // A program that needs no input may have ended by now.
    match child.stdin.take().unwrap().write_all(input) {
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => panic!("{error}"),
        _ => {}
    }
    child.wait_with_output().unwrap()
}

fn interrupt(child: &std::process::Child, signal: Signal) {
    kill_process(Pid::from_child(child), signal).unwrap();
}

#[test]
fn exec_and_run_end_with_the_code_of_the_command() {
    let api = FakeApi::start();
    for code in [0, 1, 7, 137, 255] {
        let number = code.to_string();
        assert_eq!(api.run(&["exec", "sb-n1-a", "--", "exit", &number]).status.code(), Some(code));
    }
    let ran = api.run(&["run", "debian", "--memory", "64m", "--", "exit", "3"]);
    assert_eq!(ran.status.code(), Some(3), "{}", text(&ran.stderr));
    assert!(api.saw("\"memory_limit_mb\":64"));
    assert_eq!(api.facts(|f| f.sandboxes["sb-n1-f0"]), "stopped");
}

#[test]
fn own_failures_of_run_are_125_and_others_1_or_2() {
    let api = FakeApi::start();
    let ran = api.run(&["run", "none", "--", "true"]);
    assert_eq!(ran.status.code(), Some(125));
    assert_eq!(text(&ran.stderr), "error: no image \"none\"\nhint: see `dsec image ls`\n");
    let inspected = api.run(&["inspect", "sb-n1-zz"]);
    assert_eq!(inspected.status.code(), Some(1));
    assert!(text(&inspected.stderr).starts_with("error: no sandbox sb-n1-zz\n"));
    for wrong in [&["exec", "not an id", "--", "true"][..], &["run", "debian"], &["--url", "x", "shell"]] {
        assert_eq!(api.run(wrong).status.code(), Some(125), "{wrong:?}");
    }
    assert_eq!(api.run(&["stop"]).status.code(), Some(2));
    assert_eq!(api.run(&["exec", "--help"]).status.code(), Some(0));
    let key = api.command(&["ps"]).env("DSEC_API_KEY", "dsec_wrong").output().unwrap();
    assert!(text(&key.stderr).contains("hint: give a key with --api-key"), "{}", text(&key.stderr));
}

#[test]
fn a_platform_that_is_not_up_is_named_with_what_to_do() {
    let api = FakeApi::start();
    let ran = api.command(&["ps"]).env("DSEC_URL", "http://127.0.0.1:1").output().unwrap();
    assert_eq!(ran.status.code(), Some(1));
    assert_eq!(
        text(&ran.stderr),
        "error: cannot reach http://127.0.0.1:1: is it up? (Connection refused)\n\
         hint: start it with `dsec up`, or say where it is with --url or DSEC_URL\n"
    );
}

#[test]
fn a_program_that_is_missing_leaves_no_sandbox() {
    let api = FakeApi::start();
    let ran = api.run(&["run", "debian", "--", "not_found"]);
    assert_eq!(ran.status.code(), Some(127));
    assert!(text(&ran.stderr).contains("no program \"missing\""));
    assert_eq!(api.facts(|f| f.sandboxes["sb-n1-f0"]), "stopped");
    assert_eq!(api.run(&["exec", "sb-n1-a", "not_executable"]).status.code(), Some(126));
    assert_eq!(api.run(&["exec", "sb-n1-a", "--json", "not_found"]).status.code(), Some(127));
}

#[test]
fn output_comes_on_its_stream_and_in_its_order() {
    let api = FakeApi::start();
    let apart = api.run(&["exec", "sb-n1-a", "both"]);
    assert_eq!((text(&apart.stdout), text(&apart.stderr)), ("one\nthree\n".into(), "two\n".into()));
    // Both on one pipe: the order in which they were written.
    let (mut reader, writer) = std::io::pipe().unwrap();
    let mut command = api.command(&["exec", "sb-n1-a", "both"]);
    let mut child = command.stdout(writer.try_clone().unwrap()).stderr(writer).spawn().unwrap();
    drop(command);
    let mut together = String::new();
    std::io::Read::read_to_string(&mut reader, &mut together).unwrap();
    assert_eq!(together, "one\ntwo\nthree\n");
    assert!(child.wait().unwrap().success());
}

#[test]
fn a_stream_that_breaks_is_taken_up_where_it_was() {
    let api = FakeApi::start();
    let ran = api.run(&["exec", "sb-n1-a", "breaks"]);
    assert_eq!(text(&ran.stdout), "first\nsecond\n");
    assert_eq!((ran.status.code(), api.facts(|f| f.attached)), (Some(0), 2));
}

#[test]
fn standard_input_is_passed_on_to_its_end() {
    let api = FakeApi::start();
    let input: Vec<u8> = (0..200_000u32).map(|n| b'a' + (n % 26) as u8).collect();
    let ran = with_stdin(api.command(&["exec", "sb-n1-a", "-i", "--", "cat"]), &input);
    assert_eq!(ran.stdout, input);
    assert_eq!(ran.status.code(), Some(0));
}

#[test]
fn input_that_nobody_reads_takes_nothing_from_the_output() {
    let api = FakeApi::start();
    for command in ["deaf", "closed"] {
        let mut child = api.command(&["exec", "sb-n1-a", "-i", "--", command]);
        let mut child =
            child.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let mut stdin = child.stdin.take().unwrap();
        // Whether all of it is taken is not the point.
        let _ = stdin.write_all(&vec![b'x'; 4 << 20]);
        let ran = child.wait_with_output().unwrap();
        assert_eq!((ran.status.code(), text(&ran.stdout)), (Some(9), "never read\n".into()), "{command}");
    }
}

#[test]
fn output_that_was_cut_is_no_success_unless_it_was_asked_for() {
    let api = FakeApi::start();
    let cut = api.run(&["exec", "sb-n1-a", "cut"]);
    assert_eq!(cut.status.code(), Some(125));
    assert!(text(&cut.stderr).contains("its output is not whole"), "{}", text(&cut.stderr));
    assert!(api.saw("\"output_limit_bytes\":4294967296"));
    assert_eq!(api.run(&["exec", "sb-n1-a", "--output-limit", "1m", "cut"]).status.code(), Some(0));
    assert!(api.saw("\"output_limit_bytes\":1048576"));
}

#[test]
fn a_line_that_ends_its_session_says_so() {
    let api = FakeApi::start();
    let left = text(&api.run(&["exec", "sb-n1-a", "leaves"]).stderr);
    assert!(left.contains("the session s1 has ended with this line"), "{left}");
}

#[test]
fn commands_in_the_background_are_listed_followed_and_killed() {
    let api = FakeApi::start();
    let started = api.run(&["exec", "sb-n1-a", "--detach", "--", "hang"]);
    assert_eq!((started.status.code(), text(&started.stdout)), (Some(0), "ex-0\n".into()));
    let table = text(&api.run(&["execs", "sb-n1-a"]).stdout);
    assert!(table.contains("sleep 9") && table.contains("exited   3"), "{table}");
    assert_eq!(text(&api.run(&["execs", "sb-n1-a", "-q", "--running"]).stdout), "ex-0\n");
    assert_eq!(parsed(&api.run(&["execs", "sb-n1-a", "--json"])).as_array().unwrap().len(), 2);
    // Ctrl-C leaves it running, its end is ours.
    let follow = || {
        let mut command = api.command(&["attach", "sb-n1-a", "ex-0"]);
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    };
    let left = follow();
    api.until("attached", |f| f.attached == 1);
    interrupt(&left, Signal::INT);
    let left = left.wait_with_output().unwrap();
    assert_eq!((left.status.code(), api.saw("SIGNAL")), (Some(130), false));
    let stayed = follow();
    api.until("attached again", |f| f.attached == 2);
    let killed = api.run(&["kill", "sb-n1-a", "ex-0", "--signal", "SIGTERM"]);
    assert_eq!(killed.status.code(), Some(0), "{}", text(&killed.stderr));
    let stayed = stayed.wait_with_output().unwrap();
    assert_eq!((stayed.status.code(), text(&stayed.stdout)), (Some(143), "got SIGTERM\n".into()));
    api.run(&["kill", "sb-n1-a", "ex-0"]);
    assert!(api.saw("SIGNAL {\"signal\":\"SIGKILL\",\"tree\":true}"));
}

#[test]
fn sessions_are_listed_and_closed() {
    let api = FakeApi::start();
    let table = text(&api.run(&["session", "ls", "sb-n1-a"]).stdout);
    assert!(table.contains("build  lines  5"), "{table}");
    let closed = api.run(&["session", "close", "sb-n1-a", "build", "none"]);
    assert_eq!((closed.status.code(), text(&closed.stdout)), (Some(1), "build\n".into()));
    assert!(text(&closed.stderr).contains("no session none"));
}

#[test]
fn a_port_is_forwarded_and_the_end_of_one_side_leaves_the_other() {
    let api = FakeApi::start();
    api.run(&["create", "debian"]);
    let mut command = api.command(&["port-forward", "sb-n1-f0", "0:80", "--json"]);
    let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    std::io::BufRead::read_line(&mut std::io::BufReader::new(child.stdout.as_mut().unwrap()), &mut line)
        .unwrap();
    let shown: serde_json::Value = serde_json::from_str(&line).unwrap();
    let address = shown["listen"].as_str().unwrap();
    assert!(address.starts_with("127.0.0.1:"), "{address}");
    let mut stream = std::net::TcpStream::connect(address).unwrap();
    stream.write_all(b"question").unwrap();
    stream.shutdown(std::net::Shutdown::Write).unwrap();
    let mut answer = String::new();
    std::io::Read::read_to_string(&mut stream, &mut answer).unwrap();
    assert_eq!(answer, "question");
    interrupt(&child, Signal::INT);
    assert_eq!(child.wait().unwrap().code(), Some(130));
    let mistyped = api.run(&["port-forward", "sb-n1-zz", "80"]);
    assert!(mistyped.status.code() == Some(1) && text(&mistyped.stderr).contains("no sandbox sb-n1-zz"));
}

#[test]
fn failures_are_json_where_json_is_asked_for() {
    let api = FakeApi::start();
    let error =
        |args: &[&str]| -> serde_json::Value { serde_json::from_slice(&api.run(args).stderr).unwrap() };
    let missing = error(&["run", "none", "--json", "--", "true"]);
    let shape = serde_json::json!({ "code": "not_found", "message": "no image \"none\"", "detail": {},
        "hint": "see `dsec image ls`" });
    assert_eq!(missing, shape);
    assert_eq!(error(&["exec", "sb-n1-a", "--json", "not_found"])["detail"]["reason"], "program_not_found");
    assert_eq!(error(&["ps", "--json", "--nonsense"])["code"], "invalid_argument");
    assert_eq!(error(&["ps", "--json", "--url", "http://127.0.0.1:1"])["code"], "unavailable");
    assert_eq!(error(&["stop", "--json", "sb-n1-no"])["code"], "not_found");
}

#[test]
fn the_first_ctrl_c_is_the_commands_and_the_second_ends_the_sandbox() {
    let api = FakeApi::start();
    let mut command = api.command(&["run", "debian", "--", "hang"]);
    let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    api.until("attached", |f| f.attached == 1);
    interrupt(&child, Signal::INT);
    api.until("SIGINT", |f| {
        f.seen.iter().any(|s| s.contains("SIGNAL {\"signal\":\"SIGINT\",\"tree\":false}"))
    });
    interrupt(&child, Signal::INT);
    let ran = child.wait_with_output().unwrap();
    assert_eq!(ran.status.code(), Some(130), "{}", text(&ran.stderr));
    assert!(api.saw("SIGNAL {\"signal\":\"SIGKILL\",\"tree\":true}"));
    assert_eq!(api.facts(|f| f.sandboxes["sb-n1-f0"]), "stopped");
}

#[test]
fn a_sigterm_is_the_commands_and_its_code_is_ours() {
    let api = FakeApi::start();
    let mut command = api.command(&["run", "debian", "--", "hang"]);
    let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    api.until("attached", |f| f.attached == 1);
    interrupt(&child, Signal::TERM);
    let ran = child.wait_with_output().unwrap();
    assert_eq!((ran.status.code(), text(&ran.stdout)), (Some(143), "got SIGTERM\n".into()));
    assert_eq!(api.facts(|f| f.sandboxes["sb-n1-f0"]), "stopped");
}

#[test]
fn a_reader_that_goes_away_ends_the_command_without_a_word() {
    let api = FakeApi::start();
    let mut command = api.command(&["run", "debian", "--", "endless"]);
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut some = [0; 10];
    std::io::Read::read_exact(child.stdout.as_mut().unwrap(), &mut some).unwrap();
    drop(child.stdout.take());
    let ran = child.wait_with_output().unwrap();
    assert_eq!((ran.status.code(), text(&ran.stderr)), (Some(141), String::new()));
    assert!(api.saw("SIGNAL {\"signal\":\"SIGKILL\""));
    assert_eq!(api.facts(|f| f.sandboxes["sb-n1-f0"]), "stopped");
}

#[test]
fn a_create_whose_answer_is_lost_is_asked_for_again_and_makes_one_sandbox() {
    let api = FakeApi::start();
    let ran = api.run(&["run", "lost", "--", "exit", "5"]);
    assert_eq!(ran.status.code(), Some(5), "{}", text(&ran.stderr));
    assert_eq!(api.facts(|f| f.sandboxes.clone()), [("sb-n1-f0".to_owned(), "stopped")].into());
}

#[test]
fn a_session_gets_one_line() {
    let api = FakeApi::start();
    let mut child = api.command(&["exec", "sb-n1-a", "--session", "s1", "--", "echo", "a b"]);
    let mut child = child.stdout(Stdio::null()).spawn().unwrap();
    api.until("attached", |f| f.attached == 1);
    assert!(api.saw("\"shell\":\"echo 'a b'\"") && api.saw("\"session_id\":\"s1\""));
    child.kill().unwrap();
    child.wait().unwrap();
}

#[test]
fn json_has_the_shapes_of_the_api() {
    let api = FakeApi::start();
    for _ in 0..5 {
        api.run(&["create", "debian"]);
    }
    let created = parsed(&api.run(&["create", "debian", "--json"]));
    assert_eq!(created["id"], "sb-n1-f5");
    let stopped = parsed(&api.run(&["stop", "sb-n1-f5", "--grace", "2s", "--json"]));
    assert_eq!(stopped[0]["state"], "stopped");
    assert!(api.saw("STOP sb-n1-f5 {\"grace_ms\":2000}"));
    let listed = parsed(&api.run(&["ps", "--json"]));
    assert_eq!(listed.as_array().unwrap().len(), 5, "every page, and no ended one");
    assert_eq!(parsed(&api.run(&["ps", "--all", "--json"])).as_array().unwrap().len(), 6);
    assert_eq!(parsed(&api.run(&["inspect", "sb-n1-f0"]))[0]["limits"]["pids_limit"], 64);
    assert_eq!(parsed(&api.run(&["image", "ls", "--json"]))[0]["name"], "debian");
    assert_eq!(parsed(&api.run(&["image", "inspect", "lib/debian:12"]))["name"], "lib/debian:12");
    let stats = parsed(&api.run(&["stats", "sb-n1-f0", "--json"]));
    assert_eq!((&stats[0]["memory_bytes"], &stats[0]["pids_limit"]), (&1_048_576.into(), &64.into()));
    let status = parsed(&api.run(&["status", "--json"]));
    assert_eq!((&status["healthy"], &status["nodes"][0]["node"]), (&true.into(), &"n1".into()));
    assert_eq!(
        (&status["counts"]["sandboxes"]["lost"], &status["counts"]["gathering"]),
        (&1.into(), &false.into())
    );
    let exec = api.run(&["exec", "sb-n1-f0", "--json", "--", "exit", "4"]);
    assert_eq!((exec.status.code(), &parsed(&exec)["stdout"]), (Some(4), &"its output\n".into()));
    let logs = text(&api.run(&["logs", "sb-n1-f0", "--json"]).stdout);
    assert_eq!(logs.lines().count(), 2);
    let all = parsed(&api.run(&["stop", "--all", "--json"]));
    assert_eq!(all.as_array().unwrap().len(), 5);
}

#[test]
fn tables_are_for_people() {
    let api = FakeApi::start();
    api.run(&["create", "debian"]);
    let ps = text(&api.run(&["ps"]).stdout);
    assert!(ps.starts_with("ID        STATE    IMAGE   TASK  AGE\nsb-n1-f0  running  debian"), "{ps}");
    assert!(text(&api.run(&["ps", "--wide"]).stdout).contains("1.0 MiB / 512 MiB"));
    assert_eq!(text(&api.run(&["ps", "-q"]).stdout), "sb-n1-f0\n");
    assert!(text(&api.run(&["logs", "sb-n1-f0"]).stdout).ends_with("00:00:01.004 running pid=7\n"));
    let status = text(&api.run(&["status"]).stdout);
    assert!(status.contains("2 (+0 -0)") && status.ends_with("\nsandboxes: 2 running, 1 lost\n"), "{status}");
    assert!(text(&api.run(&["stats"]).stdout).contains("0.5s"));
    assert!(text(&api.run(&["image", "ls"]).stdout).contains("0123456789ab"));
    assert_eq!(text(&api.run(&["stop", "--task", "x"]).stdout), "sb-n1-f0\n");
    assert_eq!(text(&api.run(&["stop", "--all"]).stdout), "nothing to end\n");
    let some = api.run(&["stop", "sb-n1-f0", "sb-n1-no"]);
    assert_eq!((some.status.code(), text(&some.stdout)), (Some(1), "sb-n1-f0\n".into()));
}

#[test]
fn a_file_is_copied_both_ways_with_its_mode() {
    let api = FakeApi::start();
    api.run(&["create", "debian"]);
    let here = api.path("tool.sh");
    std::fs::write(&here, vec![b'x'; 300_000]).unwrap();
    std::fs::set_permissions(&here, PermissionsExt::from_mode(0o750)).unwrap();
    let from = here.to_str().unwrap();
    let up = api.run(&["cp", from, "sb-n1-f0:/opt/tool"]);
    assert!(up.status.success(), "{}", text(&up.stderr));
    assert_eq!(api.facts(|f| f.files["/opt/tool"].clone()), (vec![b'x'; 300_000], "0750".into()));
    assert!(api.saw("LENGTH Some(\"300000\")"));
    let back = api.path("back");
    let down = parsed(&api.run(&["cp", "sb-n1-f0:/opt/tool", back.to_str().unwrap(), "--json"]));
    assert_eq!(down, serde_json::json!({ "files": 1, "bytes": 300_000 }));
    assert_eq!(std::fs::read(&back).unwrap(), vec![b'x'; 300_000]);
    assert_eq!(back.metadata().unwrap().permissions().mode() & 0o7777, 0o750);
    // Into a directory under its own name, and through pipes.
    let home = api.home.path().to_str().unwrap();
    assert!(api.run(&["cp", "sb-n1-f0:/opt/tool", home]).status.success());
    assert!(api.path("tool").is_file());
    assert_eq!(api.run(&["cp", "sb-n1-f0:/opt/tool", "-"]).stdout.len(), 300_000);
    assert!(with_stdin(api.command(&["cp", "-", "sb-n1-f0:/tmp/a b"]), b"piped").status.success());
    assert_eq!(api.facts(|f| f.files["/tmp/a b"].0.clone()), b"piped");
    let left = std::fs::read_dir(api.home.path()).unwrap().map(|e| e.unwrap().file_name());
    assert!(!left.into_iter().any(|name| name.to_str().unwrap().contains(".part-")));
}

#[test]
fn a_directory_is_copied_both_ways() {
    let api = FakeApi::start();
    api.run(&["create", "debian"]);
    let tree = api.path("tree");
    std::fs::create_dir_all(tree.join("sub")).unwrap();
    std::fs::write(tree.join("sub/file"), "content").unwrap();
    let from = tree.to_str().unwrap();
    let up = parsed(&api.run(&["cp", from, "sb-n1-f0:/work", "--json"]));
    assert_eq!(up, serde_json::json!({ "files": 2, "bytes": 7 }));
    // Now that /work is there, the source goes into it.
    assert!(api.run(&["cp", from, "sb-n1-f0:/work"]).status.success());
    assert!(api.facts(|f| f.directories.contains_key("/work/tree")));
    // Both were seen at their place once they were whole.
    let moves = api.facts(|f| f.seen.iter().filter(|line| line.starts_with("MOVE /")).count());
    assert_eq!(moves, 2);
    let out = api.path("out");
    assert!(api.run(&["cp", "sb-n1-f0:/work", out.to_str().unwrap()]).status.success());
    assert_eq!(std::fs::read_to_string(out.join("sub/file")).unwrap(), "content");
    let missing = api.run(&["cp", "sb-n1-f0:/nothing", "."]);
    assert!(text(&missing.stderr).contains("sb-n1-f0:/nothing is not there"), "{}", text(&missing.stderr));
    let gone = api.run(&["cp", from, "sb-n1-zz:/x"]);
    assert!(text(&gone.stderr).contains("no sandbox sb-n1-zz"));
    assert_eq!(api.run(&["cp", "a", "b"]).status.code(), Some(2));
}

#[test]
fn a_copy_that_is_interrupted_leaves_nothing() {
    let api = FakeApi::start();
    api.run(&["create", "debian"]);
    let tree = api.path("tree");
    std::fs::create_dir(&tree).unwrap();
    std::fs::write(tree.join("file"), vec![0; 100]).unwrap();
    api.facts(|f| f.stalled = true);
    let out = api.path("out");
    let from = tree.to_str().unwrap();
    api.facts(|f| f.directories.insert("/work".into(), Vec::new()));
    for args in [["cp", from, "sb-n1-f0:/new"], ["cp", "sb-n1-f0:/work", out.to_str().unwrap()]] {
        let before = api.facts(|f| f.stalls);
        let child = api.command(&args).stderr(Stdio::piped()).spawn().unwrap();
        api.until("under way", |f| f.stalls == before + 1);
        interrupt(&child, Signal::INT);
        assert_eq!(child.wait_with_output().unwrap().status.code(), Some(130), "{args:?}");
    }
    assert!(api.saw("REMOVE /.new.part-"));
    let left = std::fs::read_dir(api.home.path()).unwrap().map(|e| e.unwrap().file_name());
    assert_eq!(left.collect::<Vec<_>>(), ["tree"]);
}

#[test]
fn images_come_in_as_files_pipes_and_layouts() {
    let api = FakeApi::start();
    let file = api.path("rootfs.tar");
    std::fs::write(&file, vec![1; 70_000]).unwrap();
    let ran = api.run(&["image", "import", "debian", file.to_str().unwrap()]);
    assert_eq!(text(&ran.stdout), "debian: 42 files, 3.0 MiB; 1.0 MiB on disk, 0123456789ab\n");
    assert_eq!(api.facts(|f| f.imported.len()), 70_000);
    with_stdin(api.command(&["image", "import", "debian", "-", "-q"]), b"a tar");
    assert_eq!(api.facts(|f| f.imported.clone()), b"a tar");
    let layout = api.path("layout");
    std::fs::create_dir_all(layout.join("blobs/sha256")).unwrap();
    std::fs::write(layout.join("oci-layout"), "{}").unwrap();
    std::fs::write(layout.join("blobs/sha256/ab"), "blob").unwrap();
    let ran = api.run(&["image", "import", "x", layout.to_str().unwrap(), "--json"]);
    assert_eq!(parsed(&ran)["name"], "x");
    let tar = api.facts(|f| f.imported.clone());
    let mut archive = tar::Archive::new(&tar[..]);
    let names = archive.entries().unwrap().map(|e| e.unwrap().path().unwrap().display().to_string());
    assert_eq!(names.collect::<Vec<_>>(), ["blobs", "blobs/sha256", "blobs/sha256/ab", "oci-layout"]);
}

#[test]
fn images_of_registries_are_asked_for_and_got_by_the_node() {
    let api = FakeApi::start();
    let docker = api.path("docker");
    std::fs::create_dir(&docker).unwrap();
    let reference = "docker://registry.example/team/app:1";
    let run = |name: &str, options: &[&str]| {
        let mut command = api.command(&[&["image", "import", name, reference], options].concat());
        command.env("DOCKER_CONFIG", &docker);
        with_stdin(command, b"ann:a:b\n")
    };
    let asked = || serde_json::from_slice::<serde_json::Value>(&api.facts(|f| f.imported.clone())).unwrap();
    let shown = serde_json::json!({ "username": "ann", "password": "a:b" });

    assert_eq!(text(&run("app", &[]).stdout), "app: 42 files, 3.0 MiB; 1.0 MiB on disk, 0123456789ab\n");
    assert_eq!(asked(), serde_json::json!({ "reference": reference, "plain_http": false }));
    let ca = api.path("ca.pem");
    std::fs::write(&ca, "PEM").unwrap();
    run("app", &["--platform", "linux/arm64", "--cacert", ca.to_str().unwrap(), "--creds", "ann:a:b"]);
    assert_eq!((&asked()["platform"], &asked()["ca_pem"]), (&"linux/arm64".into(), &"PEM".into()));
    assert_eq!(asked()["credentials"], shown);
    run("app", &["--creds-stdin", "--plain-http"]);
    assert_eq!((&asked()["credentials"], &asked()["plain_http"]), (&shown, &true.into()));

    // What the registry refuses is told with what this program knows of it.
    let none = run("private", &[]);
    assert_eq!(none.status.code(), Some(1));
    assert!(
        text(&none.stderr).starts_with("error: who are you?\nhint: give --creds"),
        "{}",
        text(&none.stderr)
    );
    std::fs::write(docker.join("config.json"), r#"{"credsStore": "vault"}"#).unwrap();
    let helper = text(&run("private", &[]).stderr).to_owned();
    assert!(helper.contains("the helper vault, which is not asked"), "{helper}");
    std::fs::write(
        docker.join("config.json"),
        r#"{"auths": {"registry.example": {"auth": "YW5uOmE6Yg=="}}}"#,
    )
    .unwrap();
    assert!(run("private", &[]).status.success());
    assert_eq!(asked()["credentials"], shown);

    let json = run("private", &["--json", "--creds-stdin"]);
    assert_eq!(parsed(&json)["name"], "private");
    std::fs::remove_file(docker.join("config.json")).unwrap();
    let failed: serde_json::Value = serde_json::from_slice(&run("private", &["--json"]).stderr).unwrap();
    assert_eq!(
        (&failed["code"], &failed["detail"]["reason"]),
        (&"permission_denied".into(), &"registry_unauthorized".into())
    );
    for (options, word) in [
        (&["--creds", "ann"][..], "cannot be asked for"),
        (&["--authfile", "/none"], "/none"),
        (&["--cacert", "/none"], "/none"),
    ] {
        let refused = run("app", options);
        assert!(
            refused.status.code() == Some(1) && text(&refused.stderr).contains(word),
            "{}",
            text(&refused.stderr)
        );
    }
    let archive = api.run(&["image", "import", "app", "-", "--plain-http"]);
    assert!(text(&archive.stderr).contains("--plain-http is for sources that begin with docker://"));
}

#[test]
fn an_import_that_fails_or_is_cut_off_is_no_success() {
    let api = FakeApi::start();
    let bad = with_stdin(api.command(&["image", "import", "bad", "-"]), b"");
    assert_eq!(bad.status.code(), Some(1));
    assert_eq!(text(&bad.stderr), "error: it is no image\nhint: give a tar\n");
    let cut = with_stdin(api.command(&["image", "import", "cut", "-"]), b"");
    assert!(cut.status.code() == Some(1) && text(&cut.stderr).contains("broke the import off"));
    let busy = api.run(&["image", "rm", "old", "busy"]);
    assert_eq!((busy.status.code(), text(&busy.stdout)), (Some(1), "old\n".into()));
}

#[test]
fn benchmarks_write_one_line_of_json_and_leave_nothing() {
    let api = FakeApi::start();
    let keys = ["count", "concurrency", "ok", "failed", "rate_per_s", "p50_ms", "p90_ms", "p99_ms", "max_ms"];
    let bench = |args: &[&str]| {
        let ran = api.run(&[&["bench"], args, &["--json", "-n", "3", "-c", "2", "--warmup", "1"]].concat());
        assert_eq!(ran.status.code(), Some(0), "{args:?}: {}", text(&ran.stderr));
        let json = parsed(&ran);
        assert_eq!(text(&ran.stdout).lines().count(), 1);
        assert!(keys.iter().all(|key| json[key].is_number()), "{json}");
        assert_eq!((&json["bench"], &json["ok"], &json["failed"]), (&args[0].into(), &3.into(), &0.into()));
        json
    };
    let create = bench(&["create", "--phases"]);
    assert_eq!(create["phases"][1], serde_json::json!({ "name": "agent", "p50_ms": 0.9 }));
    assert!(create["stop_p50_ms"].is_number() && create["stop_p99_ms"].is_number());
    assert!(bench(&["create", "--one-call", "--hold"])["stop_rate_per_s"].is_number());
    bench(&["exec"]);
    assert!(bench(&["output", "--size", "1m"])["mib_per_s"].is_number());
    assert!(bench(&["output", "--size", "1m", "--raw"])["mib_per_s"].is_number());
    let files = bench(&["files", "--size", "1500k"]);
    assert!(files["up_mib_per_s"].is_number() && files["down_mib_per_s"].is_number());
    assert!(api.facts(|f| f.sandboxes.values().all(|state| *state == "stopped")));
    let failed = api.run(&["bench", "create", "--image", "none", "-n", "2", "--json"]);
    assert_eq!((failed.status.code(), &parsed(&failed)["failed"]), (Some(1), &2.into()));
    assert!(text(&failed.stderr).contains("no image"));
}

#[test]
fn completion_scripts_ask_this_program_for_ids() {
    let api = FakeApi::start();
    api.run(&["create", "debian"]);
    for shell in ["bash", "zsh", "fish"] {
        assert!(text(&api.run(&["completion", shell]).stdout).contains("COMPLETE"), "{shell}");
    }
    let mut command = api.command(&["--", "dsec", "stop", ""]);
    command.env("COMPLETE", "bash").env("_CLAP_COMPLETE_INDEX", "2").env("_CLAP_IFS", "\n");
    let ran = command.output().unwrap();
    assert!(text(&ran.stdout).contains("sb-n1-f0"), "{} {}", text(&ran.stdout), text(&ran.stderr));
    let complete = |words: &[&str]| {
        let mut command = api.command(&[&["--", "dsec"], words].concat());
        command.env("COMPLETE", "bash").env("_CLAP_COMPLETE_INDEX", words.len().to_string());
        text(&command.env("_CLAP_IFS", "\n").output().unwrap().stdout)
    };
    assert!(complete(&["run", "deb"]).contains("debian"));
    assert!(complete(&["cp", "sb-"]).contains("sb-n1-f0:"));
    // Nothing, and no word, where nobody answers.
    let mut silent = api.command(&["--", "dsec", "stop", ""]);
    silent.env("COMPLETE", "bash").env("_CLAP_COMPLETE_INDEX", "2").env("_CLAP_IFS", "\n");
    let silent = silent.env("DSEC_URL", "http://127.0.0.1:1").output().unwrap();
    assert!(silent.stderr.is_empty() && !text(&silent.stdout).contains("sb-"));
}
