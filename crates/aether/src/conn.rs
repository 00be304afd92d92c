//! The one connection to an edge: frames in, frames out, both bounded.

use std::collections::VecDeque;
use std::os::fd::{AsFd, OwnedFd};

use dsec_proto::guest::{self, FRAME_FDS_MAX, FRAME_MAX, FromGuest, GuestError, Reply, ToGuest, encode};
use rustix::io::Errno;
use rustix::net::SendFlags;

use crate::wire;

/// Answers that wait for the socket before no more requests are read: an edge that asks without
/// reading is held up, not the agent's memory.
const OUT_PAUSE: usize = 256 << 10;
/// Events are only made while less than this waits; they are made from state, so none is lost.
pub(crate) const OUT_EVENTS: usize = 64 << 10;
/// Bytes taken off the socket in one turn.
const IN_TURN: usize = 1 << 20;
/// Descriptors that came without a whole frame yet.
const FDS_WAITING_MAX: usize = 4 * FRAME_FDS_MAX;
/// Buffers that grew past this are given back when they are empty.
const BUFFER_KEEP: usize = 16 << 10;

/// Who asked, so that an answer reaches that connection or nobody.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Ack {
    pub(crate) connection: u32,
    pub(crate) id: u64,
}

struct Segment {
    bytes: Vec<u8>,
    sent: usize,
    fds: Vec<OwnedFd>,
}

/// A request with its descriptors.
pub(crate) struct Incoming {
    pub(crate) frame: ToGuest,
    pub(crate) fds: Vec<OwnedFd>,
}

/// The connection is of no more use.
#[derive(Debug)]
pub(crate) struct Broken;

pub(crate) struct Conn {
    pub(crate) socket: OwnedFd,
    pub(crate) number: u32,
    /// The edge has said hello: events may be sent.
    pub(crate) greeted: bool,
    /// Generation of the edge.
    pub(crate) generation: u32,
    input: Vec<u8>,
    /// Bytes of `input` that were taken: moved out in one go, not for each frame.
    taken: usize,
    input_fds: VecDeque<OwnedFd>,
    out: VecDeque<Segment>,
    out_bytes: usize,
    /// What epoll was asked to watch: reading, writing.
    pub(crate) watching: (bool, bool),
}

impl Conn {
    pub(crate) fn new(socket: OwnedFd, number: u32) -> Self {
        Self {
            socket,
            number,
            greeted: false,
            generation: 0,
            input: Vec::new(),
            taken: 0,
            input_fds: VecDeque::new(),
            out: VecDeque::new(),
            out_bytes: 0,
            watching: (true, false),
        }
    }

    /// Reads what is there. The frames are taken with [`Conn::next`].
    pub(crate) fn read(&mut self) -> Result<(), Broken> {
        self.input.drain(..self.taken);
        self.taken = 0;
        if self.input.is_empty() && self.input.capacity() > BUFFER_KEEP {
            self.input = Vec::new();
        }
        let mut taken = 0;
        while taken < IN_TURN && self.input.len() < FRAME_MAX + 4 {
            match wire::receive(self.socket.as_fd(), &mut self.input, &mut self.input_fds) {
                Ok(0) => return Err(Broken),
                Ok(n) => {
                    taken += n;
                    // A short read has emptied the socket but for what epoll will report again.
                    if n < 8192 {
                        break;
                    }
                }
                Err(Errno::AGAIN) => break,
                Err(Errno::INTR) => {}
                Err(_) => return Err(Broken),
            }
            if self.input_fds.len() > FDS_WAITING_MAX {
                return Err(Broken);
            }
        }
        Ok(())
    }

    /// The next whole request.
    pub(crate) fn next(&mut self) -> Result<Option<Incoming>, Broken> {
        if self.out_bytes > OUT_PAUSE {
            return Ok(None);
        }
        match guest::decode::<ToGuest>(&self.input[self.taken..]) {
            Ok(Some((frame, used))) => {
                self.taken += used;
                if self.taken == self.input.len() {
                    self.taken = 0;
                    self.input.clear();
                    self.input.shrink_to(BUFFER_KEEP);
                }
                let count = frame.fds as usize;
                if count > FRAME_FDS_MAX || count > self.input_fds.len() {
                    return Err(Broken);
                }
                Ok(Some(Incoming { frame, fds: self.input_fds.drain(..count).collect() }))
            }
            Ok(None) => Ok(None),
            Err(_) => Err(Broken),
        }
    }

    /// Queues a frame.
    pub(crate) fn push(&mut self, reply_to: u64, reply: Reply, fds: Vec<OwnedFd>) {
        let frame = FromGuest { reply_to, fds: fds.len() as u32, reply: Some(reply) };
        if !fds.is_empty() || self.out.is_empty() {
            self.out.push_back(Segment { bytes: Vec::new(), sent: 0, fds });
        }
        let Some(last) = self.out.back_mut() else { return };
        let before = last.bytes.len();
        encode(&frame, &mut last.bytes);
        self.out_bytes += last.bytes.len() - before;
    }

    /// Answers a request; id 0 wanted none.
    pub(crate) fn answer(&mut self, id: u64, result: Result<(Reply, Vec<OwnedFd>), GuestError>) {
        if id == 0 {
            return;
        }
        match result {
            Ok((reply, fds)) => self.push(id, reply, fds),
            Err(error) => self.push(id, Reply::Error(error), Vec::new()),
        }
    }

    /// Sends what the socket takes.
    pub(crate) fn flush(&mut self) -> Result<(), Broken> {
        while let Some(first) = self.out.front_mut() {
            let fds = wire::borrowed(&first.fds);
            let rest = &first.bytes[first.sent..];
            match wire::send(self.socket.as_fd(), rest, &fds, SendFlags::DONTWAIT) {
                Ok(n) => {
                    first.sent += n;
                    first.fds.clear();
                    self.out_bytes -= n;
                    if first.sent == first.bytes.len() {
                        self.out.pop_front();
                    }
                }
                Err(Errno::AGAIN) => return Ok(()),
                Err(_) => return Err(Broken),
            }
        }
        if self.out.capacity() > 64 {
            self.out = VecDeque::new();
        }
        Ok(())
    }

    /// Bytes that wait for the socket.
    pub(crate) fn waiting(&self) -> usize {
        self.out_bytes
    }

    /// Whether requests are read, and whether there is something to write.
    pub(crate) fn wants(&self) -> (bool, bool) {
        (self.out_bytes <= OUT_PAUSE, self.out_bytes > 0)
    }
}
