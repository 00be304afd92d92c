//! The launcher: a single-threaded process beside the edge, since a process with threads can neither
//! fork safely nor cheaply. It holds what every launch needs ready-made, forks a child for each,
//! and goes on to the next while the child sets itself up. It ends when the edge does; containers do not.

use std::collections::VecDeque;
use std::fs;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::Instant;

use dsec_sys::fdpass;
use dsec_sys::idmap::{IdRange, RANGES, UserNamespaces, user_namespaces};
use dsec_sys::process::{self, Child, Namespaces, SingleThread};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::ground::enter_bare_namespace;
use super::setup::{self, LaunchFds};
use super::wire::{FromLaunch, Launch, MESSAGE_MAX, ToLauncher};

/// Sets of namespaces kept ready. One costs about 1 ms to make and a sandbox takes one; the pool covers a
/// burst of this many, and is filled again whenever nobody waits.
const POOL: usize = 128;

/// Namespaces for one container.
#[derive(Debug)]
pub(super) struct Ready {
    pub range: IdRange,
    pub users: UserNamespaces,
    pub net: OwnedFd,
}

/// Id ranges that no container has.
#[derive(Debug)]
struct Ranges {
    /// The next one that was never used.
    next: u32,
    /// Given back, oldest first: an id rests as long as possible before somebody else has it.
    free: VecDeque<IdRange>,
    reserved: Vec<IdRange>,
}

impl Ranges {
    fn take(&mut self) -> io::Result<IdRange> {
        while let Some(range) = IdRange::nth(self.next) {
            self.next += 1;
            if !self.reserved.contains(&range) {
                return Ok(range);
            }
        }
        self.free.pop_front().ok_or_else(|| io::Error::other(format!("all {RANGES} id ranges are in use")))
    }

    fn release(&mut self, base: u32) {
        if let Some(range) = IdRange::from_base(base) {
            if range.number() < self.next {
                self.free.push_back(range);
            } else {
                self.reserved.retain(|r| *r != range);
            }
        }
    }
}

struct Launcher {
    proof: SingleThread,
    program: OwnedFd,
    ranges: Ranges,
    pool: VecDeque<Ready>,
    own_net: OwnedFd,
}

/// Forks the launcher. Returns its process and the edge's end of its socket.
pub(super) fn start(proof: SingleThread, program: OwnedFd, scratch: &Path) -> io::Result<(Child, OwnedFd)> {
    let (edge, launcher) = fdpass::pair()?;
    let child = proof.fork(Namespaces::NONE, None, || {
        process::close_in_child(&edge);
        // The proof holds in the child: fork copies one thread.
        let result = SingleThread::check().and_then(|proof| Launcher::prepare(proof, program, scratch));
        match result.and_then(|mut l| {
            fdpass::send(launcher.as_fd(), b"ready", &[])?;
            l.serve(launcher.as_fd())
        }) {
            Ok(()) => 0,
            Err(error) => {
                let _edge_gone = fdpass::send(launcher.as_fd(), error.to_string().as_bytes(), &[]);
                1
            }
        }
    })?;
    let mut buffer = [0; 512];
    match fdpass::receive(edge.as_fd(), &mut buffer) {
        Ok((5, _)) if buffer.starts_with(b"ready") => Ok((child, edge)),
        Ok((n, _)) => Err(io::Error::other(String::from_utf8_lossy(&buffer[..n]).into_owned())),
        Err(error) => Err(error),
    }
}

impl Launcher {
    fn prepare(proof: SingleThread, program: OwnedFd, scratch: &Path) -> io::Result<Self> {
        let _unsupported = rustix::thread::set_name(c"dsec-launcher");
        process::reap_automatically();
        rustix::process::setsid()?;
        rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o022));
        // Out of the way of the numbers that an agent's descriptors are put at.
        let program = process::dup_above(program.as_fd(), 256)?;
        let null = fs::OpenOptions::new().read(true).write(true).open("/dev/null")?;
        rustix::stdio::dup2_stdin(&null)?;
        rustix::stdio::dup2_stdout(&null)?;
        enter_bare_namespace(scratch)?;
        let own_net = fs::File::open("/proc/thread-self/ns/net")?.into();
        Ok(Self {
            proof,
            program,
            ranges: Ranges { next: 0, free: VecDeque::new(), reserved: Vec::new() },
            pool: VecDeque::with_capacity(POOL),
            own_net,
        })
    }

    /// Answers the edge until it is gone; fills the pool in between.
    fn serve(&mut self, edge: BorrowedFd<'_>) -> io::Result<()> {
        let mut buffer = vec![0; MESSAGE_MAX];
        // What stopped the last attempt to fill: then it is tried again only when something has changed.
        let mut fill = true;
        loop {
            let busy = fill && self.pool.len() < POOL;
            if busy && !readable(edge)? {
                match self.make_ready() {
                    Ok(ready) => self.pool.push_back(ready),
                    Err(_) => fill = false,
                }
                continue;
            }
            let (n, fds) = fdpass::receive(edge, &mut buffer)?;
            if n == 0 {
                return Ok(());
            }
            fill = true;
            match serde_json::from_slice(&buffer[..n]).map_err(io::Error::other)? {
                ToLauncher::Reserve(bases) => self.reserve(&bases),
                ToLauncher::Release(base) => self.ranges.release(base),
                ToLauncher::Launch(launch) => self.launch(&launch, fds),
            }
        }
    }

    fn reserve(&mut self, bases: &[u32]) {
        self.ranges.reserved.extend(bases.iter().filter_map(|base| IdRange::from_base(*base)));
        // Ranges that were made ready before this was known.
        let reserved = &self.ranges.reserved;
        self.pool.retain(|ready| !reserved.contains(&ready.range));
    }

    fn make_ready(&mut self) -> io::Result<Ready> {
        let range = self.ranges.take()?;
        let made = user_namespaces(&self.proof, range).and_then(|users| Ok((users, self.network()?)));
        match made {
            Ok((users, net)) => Ok(Ready { range, users, net }),
            Err(error) => {
                self.ranges.release(range.base());
                Err(error)
            }
        }
    }

    /// A network namespace of the host's user namespace, with loopback up and every port free to bind.
    fn network(&self) -> io::Result<OwnedFd> {
        process::unshare(Namespaces::NET)?;
        let made = (|| {
            process::loopback_up()?;
            fs::write("/proc/sys/net/ipv4/ip_unprivileged_port_start", "0")?;
            Ok(fs::File::open("/proc/thread-self/ns/net")?.into())
        })();
        process::enter(self.own_net.as_fd())?;
        made
    }

    fn launch(&mut self, launch: &Launch, fds: Vec<OwnedFd>) {
        let Some(fds) = LaunchFds::sort(launch, fds) else { return };
        let started = Instant::now();
        let result = match self.pool.pop_front().map_or_else(|| self.make_ready(), Ok) {
            Ok(ready) => {
                let at_hand = started.elapsed();
                let forked = self.proof.fork(Namespaces::PID, fds.cgroup.as_ref().map(AsFd::as_fd), || {
                    setup::run(launch, &fds, &ready, self.program.as_fd())
                });
                match forked {
                    Ok(child) => {
                        let us = [at_hand, started.elapsed() - at_hand].map(|d| d.as_micros() as u64);
                        Ok((child, FromLaunch::Forked { pid: 0, id_base: ready.range.base(), us }))
                    }
                    Err(error) => {
                        self.pool.push_front(ready);
                        Err(("fork into the new namespaces", error))
                    }
                }
            }
            Err(error) => Err(("make namespaces", error)),
        };
        // The edge may have given up on this launch; then nobody reads, and its child is found by the sweep.
        let _edge_gone_or_tired = match result {
            Ok((child, FromLaunch::Forked { id_base, us, .. })) => {
                let reply = FromLaunch::Forked { pid: child.pid, id_base, us };
                setup::tell(fds.channel.as_fd(), &reply, &[child.pidfd.as_fd()])
            }
            Ok(_) => Ok(()),
            Err((what, error)) => setup::tell_failure(fds.channel.as_fd(), what, &error),
        };
    }
}

fn readable(fd: BorrowedFd<'_>) -> io::Result<bool> {
    match poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&Timespec { tv_sec: 0, tv_nsec: 0 })) {
        Err(rustix::io::Errno::INTR) => Ok(false),
        Err(e) => Err(e.into()),
        Ok(n) => Ok(n > 0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_that_is_reserved_or_in_use_is_never_handed_out() {
        let reserved = vec![IdRange::nth(0).unwrap(), IdRange::nth(2).unwrap()];
        let mut ranges = Ranges { next: 0, free: VecDeque::new(), reserved };
        assert_eq!(ranges.take().unwrap().number(), 1);
        assert_eq!(ranges.take().unwrap().number(), 3);
        ranges.release(IdRange::nth(1).unwrap().base());
        assert_eq!(ranges.take().unwrap().number(), 4, "a range is used again before the fresh ones are");
        ranges.next = RANGES;
        assert_eq!(ranges.take().unwrap().number(), 1);
        assert!(ranges.take().is_err());
        ranges.release(IdRange::nth(2).unwrap().base());
        assert_eq!(ranges.take().unwrap().number(), 2, "an adopted container's range comes back too");
    }
}
