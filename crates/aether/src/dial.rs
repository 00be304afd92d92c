//! Connections to servers in the sandbox. The agent is in the sandbox's network namespace, so its
//! loopback is theirs.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use dsec_proto::guest::{Empty, GuestError, GuestErrorKind as Kind, Reply};
use rustix::event::epoll::EventFlags;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, connect, socket_with, sockopt};

use crate::agent::{Agent, On};
use crate::conn::Ack;
use crate::fail::{fail, invalid, os, reason};
use crate::slab::Key;

/// A server whose queue is full does not answer at all.
const WAIT: Duration = Duration::from_secs(3);
/// Connections being made at once.
const DIALS_MAX: usize = 256;

/// A connection being made.
pub(crate) struct Dialing {
    socket: OwnedFd,
    port: u16,
    v6: bool,
    ack: Ack,
    until: Instant,
}

impl Dialing {
    pub(crate) fn due(&self) -> Instant {
        self.until
    }
}

impl Agent {
    /// Starts to connect: IPv4, and where nothing listens there, IPv6.
    pub(crate) fn dial(&mut self, ack: Ack, port: u32) -> Result<(), GuestError> {
        let port = u16::try_from(port).ok().filter(|p| *p > 0);
        let port = port.ok_or_else(|| invalid("a port is a number from 1 to 65535"))?;
        if self.dials.len() >= DIALS_MAX {
            return Err(fail(Kind::ResourceExhausted, "too many connections are being made at once"));
        }
        self.attempt(ack, port, false, self.clock.now() + WAIT)
    }

    fn attempt(&mut self, ack: Ack, port: u16, v6: bool, until: Instant) -> Result<(), GuestError> {
        let (family, ip) = if v6 {
            (AddressFamily::INET6, IpAddr::V6(Ipv6Addr::LOCALHOST))
        } else {
            (AddressFamily::INET, IpAddr::V4(Ipv4Addr::LOCALHOST))
        };
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let started = socket_with(family, SocketType::STREAM, flags, None).and_then(|socket| {
            match connect(&socket, &SocketAddr::new(ip, port)) {
                Ok(()) | Err(Errno::INPROGRESS) => Ok(socket),
                Err(e) => Err(e),
            }
        });
        match started {
            Ok(socket) => {
                let key = self.dials.insert(Dialing { socket, port, v6, ack, until });
                if let Some(dial) = self.dials.get(key) {
                    let added = self.poll.add(&dial.socket, On::Dial, Some(key), EventFlags::OUT);
                    added.map_err(|e| os("epoll", e))?;
                }
                Ok(())
            }
            Err(e) => self.refused(ack, port, v6, until, e),
        }
    }

    fn refused(&mut self, ack: Ack, port: u16, v6: bool, until: Instant, e: Errno) -> Result<(), GuestError> {
        if !v6 {
            return self.attempt(ack, port, true, until);
        }
        Err(match e {
            // Without IPv6 in the sandbox the second try says nothing about the port.
            Errno::CONNREFUSED | Errno::ADDRNOTAVAIL | Errno::NETUNREACH | Errno::AFNOSUPPORT => {
                fail(Kind::Unavailable, format!("nothing listens on port {port} inside the sandbox"))
            }
            e => fail(
                Kind::Unavailable,
                format!("cannot connect to port {port} inside the sandbox: {}", reason(e)),
            ),
        })
    }

    /// The kernel has an answer.
    pub(crate) fn dial_ready(&mut self, key: Key) {
        let Some(dial) = self.dials.remove(key) else { return };
        self.poll.remove(&dial.socket);
        let result = match sockopt::socket_error(&dial.socket) {
            Ok(Ok(())) => {
                self.answer(dial.ack, Ok((Reply::Done(Empty {}), vec![dial.socket])));
                return;
            }
            Ok(Err(e)) | Err(e) => self.refused(dial.ack, dial.port, dial.v6, dial.until, e),
        };
        if let Err(error) = result {
            self.answer(dial.ack, Err(error));
        }
    }

    /// Nobody answered in time.
    pub(crate) fn dial_due(&mut self, key: Key) {
        let Some(dial) = self.dials.remove(key) else { return };
        let message = format!("port {} inside the sandbox does not accept: its queue is full", dial.port);
        self.answer(dial.ack, Err(fail(Kind::Unavailable, message)));
    }
}
