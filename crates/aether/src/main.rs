//! `dsec-aether`: the agent inside a sandbox, pid 1 of its process namespace.
//!
//! It starts commands, keeps what they wrote and how they ended, runs shell sessions, does file
//! operations as a user of the sandbox, and reaps orphans. It is told what to do over one Unix
//! socket that is bound outside ([`dsec_proto::guest`]); it trusts that edge and nobody inside.
//!
//! ```text
//! agent     the loop, timers, reaping            child    from fork to exec, and who may do what
//! wire      frames and descriptors on a socket   stream   output: memory, spool file, limit
//! requests  what is asked                        exec     a command's life        start: its birth
//! chronus   shell sessions                       files    file operations (in children)
//! report    what a child says before its exec        conn      frames in and out
//! dial      connections to ports                 tree     process trees
//! clock     time, which can stand still
//! users     /etc/passwd and /etc/group           sys      system calls; the only unsafe code
//! ```

mod agent;
mod child;
mod chronus;
mod clock;
mod conn;
mod dial;
mod exec;
mod fail;
mod files;
mod report;
mod requests;
mod slab;
mod start;
mod stream;
mod sys;
mod tree;
mod users;
mod wire;

use std::os::fd::OwnedFd;

use dsec_proto::guest::{Boot, boot_fd};
use prost::Message;
use rustix::fs::{Mode, OFlags};

use crate::agent::Agent;
use crate::child::Host;

/// Exit codes that a launcher sees when the agent could not start, each for one stage.
const NO_DESCRIPTOR: i32 = 70;
const NO_CONFIG: i32 = 71;
const NO_LOOP: i32 = 72;
const PANIC: i32 = 101;

/// Larger settings are no settings.
const BOOT_MAX: usize = 8 << 20;

fn main() {
    // Unwinding would leave half a state behind; a child must not run into the agent's loop.
    std::panic::set_hook(Box::new(|_| sys::exit(PANIC)));
    sys::harden_self();
    sys::default_signals();
    sys::cloexec_from(3);
    let (listen, host) = match adopt() {
        Ok(adopted) => adopted,
        Err(code) => sys::exit(code),
    };
    // The directory of whoever started us is not the sandbox's.
    let _ = rustix::process::chdir("/");
    if let Ok(agent) = Agent::new(host, listen) {
        sys::trim_heap();
        agent.run();
    }
    sys::exit(NO_LOOP)
}

/// Takes over what the launcher left open.
fn adopt() -> Result<(OwnedFd, Host), i32> {
    let take = |fd| sys::adopt(fd).ok_or(NO_DESCRIPTOR);
    let listen = take(boot_fd::LISTEN)?;
    let user_ns = take(boot_fd::USER_NS)?;
    let spool = take(boot_fd::SPOOL)?;
    let boot = read_boot(&take(boot_fd::CONFIG)?).ok_or(NO_CONFIG)?;
    let tasks = (0..boot.tasks_fds as i32).map(|i| take(boot_fd::TASKS + i)).collect::<Result<_, _>>()?;
    let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NOCTTY;
    let null = rustix::fs::open("/dev/null", flags, Mode::empty()).map_err(|_| NO_DESCRIPTOR)?;
    Ok((listen, Host { boot, user_ns, tasks, spool, null }))
}

fn read_boot(config: &OwnedFd) -> Option<Boot> {
    let mut bytes = Vec::new();
    let mut chunk = [0; 4096];
    while bytes.len() < BOOT_MAX {
        match rustix::io::pread(config, &mut chunk, bytes.len() as u64).ok()? {
            0 => return Boot::decode(bytes.as_slice()).ok(),
            n => bytes.extend_from_slice(&chunk[..n]),
        }
    }
    None
}
