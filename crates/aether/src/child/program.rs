//! A command's environment and image: where its program is, and why it could not be run.

use std::collections::BTreeMap;
use std::ffi::CString;
use std::os::unix::ffi::OsStringExt;

use dsec_proto::guest::{GuestError, GuestErrorKind as Kind, PROGRAM_NOT_EXECUTABLE, PROGRAM_NOT_FOUND};
use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, statat};
use rustix::io::Errno;

use super::{Exec, Host, Stdio};
use crate::fail::{fail, fail_hint, invalid, os, reason, show};
use crate::users::User;
use crate::{chronus, sys};

const PATH_DEFAULT: &[u8] = b"/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
/// `MAX_ARG_STRLEN`: the kernel's limit for one argument or variable.
const ARGUMENT_MAX: usize = 128 * 1024;

/// What is to be run.
pub(crate) enum Program<'a> {
    Argv(&'a [Vec<u8>]),
    /// A line for `/bin/sh -c`.
    Line(&'a [u8]),
    /// A session's shell, by path; empty: bash, else sh.
    Session(&'a [u8]),
    /// A session's shell on a terminal.
    Interactive(&'a [u8]),
}

/// Everything `execve` takes.
pub(super) struct Image {
    argv: Vec<CString>,
    env: Vec<CString>,
    path: Vec<u8>,
}

/// Makes the argument and environment lists.
pub(super) fn prepare(
    host: &Host,
    exec: &Exec<'_>,
    user: &User,
    user_was_named: bool,
) -> Result<Image, GuestError> {
    let argv: Vec<Vec<u8>> = match exec.program {
        Program::Argv(argv) => argv.to_vec(),
        Program::Line(line) => vec![b"/bin/sh".to_vec(), b"-c".to_vec(), line.to_vec()],
        Program::Session(shell) => {
            let shell = pick_shell(shell);
            let real = std::fs::canonicalize(std::ffi::OsString::from_vec(shell.clone()))
                .map_or_else(|_| shell.clone(), |p| p.into_os_string().into_vec());
            chronus::shell_argv(&shell, &real)
        }
        Program::Interactive(shell) => vec![pick_shell(shell), b"-i".to_vec()],
    };
    let env = environment(host, exec, user, user_was_named)?;
    let path = env.get(&b"PATH"[..]).map_or(PATH_DEFAULT, |v| v.as_slice()).to_vec();
    let c = |bytes: Vec<u8>| CString::new(bytes).map_err(|_| invalid("an argument contains a NUL byte"));
    Ok(Image {
        argv: argv.into_iter().map(c).collect::<Result<_, _>>()?,
        env: env.into_iter().map(|(k, v)| c([k, b"=", &v].concat())).collect::<Result<_, _>>()?,
        path,
    })
}

fn pick_shell(wanted: &[u8]) -> Vec<u8> {
    let usable = |path: &str| rustix::fs::access(path, rustix::fs::Access::EXEC_OK).is_ok();
    match wanted {
        b"" if usable("/bin/bash") => b"/bin/bash".to_vec(),
        b"" => b"/bin/sh".to_vec(),
        shell => shell.to_vec(),
    }
}

/// The request's variables over the user's (`HOME` and the like) over the sandbox's. A user that was
/// not named is the sandbox's own, and for that one the sandbox's variables say what `HOME` is.
fn environment<'a>(
    host: &'a Host,
    exec: &Exec<'a>,
    user: &User,
    user_was_named: bool,
) -> Result<BTreeMap<&'a [u8], Vec<u8>>, GuestError> {
    let mut env: BTreeMap<&[u8], Vec<u8>> = BTreeMap::new();
    let split = |entry: &'a Vec<u8>| -> Result<(&'a [u8], Vec<u8>), GuestError> {
        match entry.iter().position(|b| *b == b'=') {
            Some(at @ 1..) => Ok((&entry[..at], entry[at + 1..].to_vec())),
            _ => Err(invalid(format!("`{}` is no environment variable: NAME=VALUE is", show(entry)))),
        }
    };
    for entry in &host.boot.env {
        let (key, value) = split(entry)?;
        env.insert(key, value);
    }
    let mut of_user = vec![(&b"HOME"[..], user.home.clone()), (b"SHELL", user.shell.clone())];
    if let Some(name) = &user.name {
        of_user.extend([(&b"USER"[..], name.clone()), (b"LOGNAME", name.clone())]);
    }
    for (key, value) in of_user {
        if user_was_named || !env.contains_key(key) {
            env.insert(key, value);
        }
    }
    for entry in exec.env {
        let (key, value) = split(entry)?;
        env.insert(key, value);
    }
    env.entry(b"PATH").or_insert_with(|| PATH_DEFAULT.to_vec());
    if matches!(exec.stdio, Stdio::Terminal(_)) {
        env.entry(b"TERM").or_insert_with(|| b"xterm-256color".to_vec());
    }
    Ok(env)
}

impl Image {
    /// Runs it. Returns why not.
    pub(super) fn exec(mut self, user: &User) -> GuestError {
        let name = match self.argv.first() {
            Some(name) if !name.is_empty() => name.clone(),
            _ => return invalid("no program is named"),
        };
        if name.as_bytes().contains(&b'/') {
            let errno = self.try_path(&name);
            return self.explain(name.as_bytes(), errno, user);
        }
        let path = std::mem::take(&mut self.path);
        let mut denied = None;
        for dir in path.split(|b| *b == b':') {
            let dir = if dir.is_empty() { b"." } else { dir };
            let Ok(full) = CString::new([dir, b"/", name.as_bytes()].concat()) else { continue };
            match self.try_path(&full) {
                Errno::NOENT if !exists(full.as_bytes()) => {}
                Errno::NOTDIR | Errno::NAMETOOLONG | Errno::LOOP => {}
                Errno::ACCESS if is_dir(full.as_bytes()) || !exists(full.as_bytes()) => {}
                Errno::ACCESS => denied = Some(full),
                errno => return self.explain(full.as_bytes(), errno, user),
            }
        }
        match denied {
            Some(full) => self.explain(full.as_bytes(), Errno::ACCESS, user),
            None => not_found(format!("no program `{}` in PATH ({})", show(name.as_bytes()), show(&path))),
        }
    }

    /// A file that is no image the kernel knows is a script for `/bin/sh`, as `execvp` has it.
    fn try_path(&self, path: &CString) -> Errno {
        match sys::execve(path, &self.argv, &self.env) {
            Errno::NOEXEC => {
                let mut argv = vec![c"/bin/sh".to_owned(), path.clone()];
                argv.extend(self.argv.iter().skip(1).cloned());
                sys::execve(c"/bin/sh", &argv, &self.env)
            }
            errno => errno,
        }
    }

    fn explain(&self, path: &[u8], errno: Errno, user: &User) -> GuestError {
        let shown = show(path);
        match errno {
            Errno::NOENT if exists(path) => {
                GuestError { reason: PROGRAM_NOT_FOUND.to_owned(), ..missing_interpreter(path) }
            }
            Errno::NOENT => not_found(format!("program {shown} does not exist")),
            Errno::NOTDIR => not_found(format!("program {shown}: a part of the path is not a directory")),
            Errno::ACCESS if is_dir(path) => not_executable(format!("{shown} is a directory")),
            Errno::ACCESS => GuestError {
                hint: "set its execute permission, or name its interpreter".to_owned(),
                ..not_executable(format!("{shown} may not be executed by user {}", user.uid))
            },
            Errno::TOOBIG => self.too_big(),
            Errno::TXTBSY => fail(Kind::Conflict, format!("{shown} is open for writing")),
            Errno::LOOP | Errno::NAMETOOLONG | Errno::NOEXEC | Errno::LIBBAD => {
                not_executable(format!("program {shown}: {}", reason(errno)))
            }
            errno => os(format!("cannot run {shown}"), errno),
        }
    }

    fn too_big(&self) -> GuestError {
        let all = || self.argv.iter().chain(&self.env);
        let total: usize = all().map(|s| s.as_bytes_with_nul().len() + size_of::<usize>()).sum();
        let longest = all().map(|s| s.as_bytes_with_nul().len()).max().unwrap_or(0);
        let limit = if longest > ARGUMENT_MAX {
            format!("the longest is {longest}; the kernel takes {ARGUMENT_MAX}")
        } else {
            "the kernel takes a quarter of the stack limit, 2 MiB as a rule".to_owned()
        };
        fail_hint(
            Kind::TooLarge,
            format!("argument list too long (environment and arguments are {total} bytes; {limit})"),
            "put it into a file, or send it as standard input",
        )
    }
}

fn not_found(message: String) -> GuestError {
    GuestError { reason: PROGRAM_NOT_FOUND.to_owned(), ..invalid(message) }
}

fn not_executable(message: String) -> GuestError {
    GuestError { reason: PROGRAM_NOT_EXECUTABLE.to_owned(), ..invalid(message) }
}

fn exists(path: &[u8]) -> bool {
    statat(CWD, path, AtFlags::SYMLINK_NOFOLLOW).is_ok()
}

fn is_dir(path: &[u8]) -> bool {
    statat(CWD, path, AtFlags::empty())
        .is_ok_and(|s| FileType::from_raw_mode(s.st_mode) == FileType::Directory)
}

/// The program is there and still the kernel says that something is not.
fn missing_interpreter(path: &[u8]) -> GuestError {
    let shown = show(path);
    if statat(CWD, path, AtFlags::empty()).is_err() {
        return invalid(format!("program {shown} is a symbolic link to nothing"));
    }
    let mut start = [0; 256];
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    let read = rustix::fs::open(path, flags, Mode::empty()).and_then(|f| rustix::io::read(f, &mut start));
    let start = &start[..read.unwrap_or(0)];
    if let Some(line) = start.strip_prefix(b"#!") {
        let line = line.split(|b| *b == b'\n').next().unwrap_or_default();
        let mut words = line.split(|b| b" \t".contains(b)).filter(|word| !word.is_empty());
        let interpreter = words.next().unwrap_or_default();
        let message =
            format!("script {shown} names the interpreter {}, which does not exist", show(interpreter));
        if interpreter.ends_with(b"\r") {
            return fail_hint(Kind::InvalidArgument, message, "the script has CR LF line ends");
        }
        return invalid(message);
    }
    fail_hint(
        Kind::InvalidArgument,
        format!("program {shown} cannot be loaded: its dynamic loader does not exist"),
        "it was built for another C library or architecture",
    )
}
