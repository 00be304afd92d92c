//! An edge, as far as tests need one.

use std::collections::{BTreeMap, VecDeque};
use std::fs;
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use dsec_proto::guest::{
    self, ExecInfo, ExecRef, ExecStart, FileCall, FileOp, FileReply, FromGuest, GENERATION, GuestError,
    Hello, HelloReply, Reply, Request, Stream, ToGuest, decode, encode,
};
use prost::Message;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg,
};

/// Frames and descriptors of one socket.
pub(crate) struct Frames {
    socket: UnixStream,
    buffer: Vec<u8>,
    fds: VecDeque<OwnedFd>,
}

impl Frames {
    fn new(socket: UnixStream) -> Self {
        // Nothing here takes long; a test that waits in vain says where.
        socket.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        Self { socket, buffer: Vec::new(), fds: VecDeque::new() }
    }

    pub(crate) fn send_bytes(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(16))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() {
            assert!(control.push(SendAncillaryMessage::ScmRights(fds)));
        }
        let mut rest = bytes;
        while !rest.is_empty() {
            let n = sendmsg(&self.socket, &[IoSlice::new(rest)], &mut control, SendFlags::NOSIGNAL).unwrap();
            control.clear();
            rest = &rest[n..];
        }
    }

    /// The next frame; `None` when the other side has closed.
    fn next<M: Message + Default>(&mut self) -> Option<M> {
        loop {
            if let Some((frame, used)) = decode::<M>(&self.buffer).unwrap() {
                self.buffer.drain(..used);
                return Some(frame);
            }
            let mut chunk = [0; 65536];
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(64))];
            let mut control = RecvAncillaryBuffer::new(&mut space);
            let flags = RecvFlags::CMSG_CLOEXEC;
            let got = recvmsg(&self.socket, &mut [IoSliceMut::new(&mut chunk)], &mut control, flags)
                .expect("the agent answers in time");
            for message in control.drain() {
                if let RecvAncillaryMessage::ScmRights(rights) = message {
                    self.fds.extend(rights);
                }
            }
            if got.bytes == 0 {
                return None;
            }
            self.buffer.extend_from_slice(&chunk[..got.bytes]);
        }
    }

    fn take_fds(&mut self, count: u32) -> Vec<OwnedFd> {
        self.fds.drain(..count as usize).collect()
    }
}

/// A connected edge. It remembers what it was told of each exec.
pub(crate) struct Client {
    frames: Frames,
    spool: PathBuf,
    next_id: u64,
    pub(crate) hello: HelloReply,
    answers: BTreeMap<u64, (Reply, Vec<OwnedFd>)>,
    ended: BTreeMap<String, ExecInfo>,
    seen: BTreeMap<String, (Told, Told)>,
    pub(crate) sessions_ended: Vec<String>,
}

/// A stream as the events told it.
#[derive(Default, Clone)]
pub(crate) struct Told {
    head: Vec<u8>,
    pub(crate) last: Stream,
}

impl Told {
    fn take(&mut self, stream: Option<Stream>) {
        let Some(stream) = stream else { return };
        assert!(stream.total >= self.last.total, "a stream shrinks");
        if !stream.head.is_empty() {
            assert!(stream.head_offset as usize <= self.head.len(), "bytes are missing before {stream:?}");
            self.head.truncate(stream.head_offset as usize);
            self.head.extend_from_slice(&stream.head);
        }
        self.last = stream;
    }
}

/// How a command ended and what it wrote.
#[derive(Debug)]
pub(crate) struct Run {
    pub(crate) info: ExecInfo,
    pub(crate) out: String,
    pub(crate) err: String,
}

/// A command line.
pub(crate) fn shell(id: &str, line: &str) -> ExecStart {
    ExecStart { exec: id.into(), shell: Some(line.into()), ..ExecStart::default() }
}

/// A program and arguments.
pub(crate) fn exec(id: &str, argv: &[&str]) -> ExecStart {
    let argv = argv.iter().map(|a| a.as_bytes().to_vec()).collect();
    ExecStart { exec: id.into(), argv, ..ExecStart::default() }
}

impl Client {
    pub(crate) fn connect(socket: &Path, spool: &Path) -> Self {
        let mut client = Self {
            frames: Frames::new(UnixStream::connect(socket).unwrap()),
            spool: spool.to_owned(),
            next_id: 0,
            hello: HelloReply::default(),
            answers: BTreeMap::new(),
            ended: BTreeMap::new(),
            seen: BTreeMap::new(),
            sessions_ended: Vec::new(),
        };
        match client.call(Request::Hello(Hello { generation: GENERATION }), &[]) {
            Ok((Reply::Hello(hello), _)) => {
                for exec in &hello.execs {
                    client.learn(exec.clone());
                }
                client.hello = hello;
            }
            other => panic!("hello was answered with {other:?}"),
        }
        client
    }

    /// Sends without waiting.
    pub(crate) fn send(&mut self, request: Request, fds: &[OwnedFd]) -> u64 {
        self.next_id += 1;
        let frame = ToGuest { id: self.next_id, fds: fds.len() as u32, request: Some(request) };
        let mut bytes = Vec::new();
        encode(&frame, &mut bytes);
        let fds: Vec<BorrowedFd<'_>> = fds.iter().map(AsFd::as_fd).collect();
        self.frames.send_bytes(&bytes, &fds);
        self.next_id
    }

    pub(crate) fn send_raw(&mut self, bytes: &[u8]) {
        self.frames.send_bytes(bytes, &[]);
    }

    /// The other side has closed.
    pub(crate) fn is_closed(&mut self) -> bool {
        while let Some(frame) = self.frames.next::<FromGuest>() {
            self.event(frame);
        }
        true
    }

    fn learn(&mut self, info: ExecInfo) {
        let seen = self.seen.entry(info.exec.clone()).or_default();
        seen.0.take(info.stdout.clone());
        seen.1.take(info.stderr.clone());
        if info.ended {
            assert!(self.ended.insert(info.exec.clone(), info).is_none(), "an exec ends twice");
        }
    }

    fn event(&mut self, frame: FromGuest) {
        if frame.reply_to != 0 {
            let fds = self.frames.take_fds(frame.fds);
            self.answers.insert(frame.reply_to, (frame.reply.expect("an answer says something"), fds));
            return;
        }
        match frame.reply {
            Some(Reply::Output(output)) => {
                let seen = self.seen.entry(output.exec).or_default();
                seen.0.take(output.stdout);
                seen.1.take(output.stderr);
            }
            Some(Reply::Exited(info)) => self.learn(info),
            Some(Reply::SessionEnded(session)) => self.sessions_ended.push(session.session),
            other => panic!("no event: {other:?}"),
        }
    }

    /// Waits for the answer to a request sent before.
    pub(crate) fn answer(&mut self, id: u64) -> Result<(Reply, Vec<OwnedFd>), GuestError> {
        loop {
            match self.answers.remove(&id) {
                Some((Reply::Error(error), _)) => return Err(error),
                Some(answer) => return Ok(answer),
                None => self.pump(),
            }
        }
    }

    pub(crate) fn call(
        &mut self,
        request: Request,
        fds: &[OwnedFd],
    ) -> Result<(Reply, Vec<OwnedFd>), GuestError> {
        let id = self.send(request, fds);
        self.answer(id)
    }

    /// Starts a command.
    pub(crate) fn start(
        &mut self,
        start: ExecStart,
        fds: &[OwnedFd],
    ) -> Result<(u32, Vec<OwnedFd>), GuestError> {
        match self.call(Request::ExecStart(start), fds)? {
            (Reply::ExecStarted(started), fds) => Ok((started.pid, fds)),
            other => panic!("{other:?}"),
        }
    }

    /// Runs a command to its end.
    pub(crate) fn run(&mut self, start: ExecStart) -> Run {
        let id = start.exec.clone();
        self.start(start, &[]).unwrap();
        self.wait(&id)
    }

    /// Waits for the end of a command.
    pub(crate) fn wait(&mut self, id: &str) -> Run {
        while !self.ended.contains_key(id) {
            let frame: FromGuest = self.frames.next().expect("the connection stays");
            self.event(frame);
        }
        Run { info: self.ended[id].clone(), out: self.text(id, 0), err: self.text(id, 1) }
    }

    /// Waits until what was told of a stream satisfies a condition.
    pub(crate) fn until(&mut self, id: &str, which: usize, wanted: impl Fn(&Told, &str) -> bool) -> String {
        loop {
            let text = self.text(id, which);
            if wanted(&self.told(id, which), &text) {
                return text;
            }
            let frame: FromGuest = self.frames.next().expect("the connection stays");
            self.event(frame);
        }
    }

    /// Takes in one more event.
    pub(crate) fn pump(&mut self) {
        let frame: FromGuest = self.frames.next().expect("the connection stays");
        self.event(frame);
    }

    pub(crate) fn told(&self, id: &str, which: usize) -> Told {
        let seen = self.seen.get(id).cloned().unwrap_or_default();
        if which == 0 { seen.0 } else { seen.1 }
    }

    pub(crate) fn text(&self, id: &str, which: usize) -> String {
        String::from_utf8_lossy(&self.bytes(id, which)).into_owned()
    }

    /// Kept bytes of a stream.
    pub(crate) fn bytes(&self, id: &str, which: usize) -> Vec<u8> {
        let told = self.told(id, which);
        if !told.last.spooled {
            return told.head;
        }
        let file = fs::read(self.spool.join(format!("{id}.{}", ["out", "err"][which]))).unwrap();
        let (start, kept) = (told.last.start as usize, told.last.kept as usize);
        file[start..start + kept].to_vec()
    }

    pub(crate) fn spool_file(&self, name: &str) -> PathBuf {
        self.spool.join(name)
    }

    pub(crate) fn forget(&mut self, id: &str) {
        self.call(Request::ExecForget(ExecRef { exec: id.into() }), &[]).unwrap();
        self.ended.remove(id);
        self.seen.remove(id);
    }

    pub(crate) fn signal(&mut self, id: &str, signal: i32, tree: bool) {
        let request = guest::ExecSignal { exec: id.into(), signal, tree };
        self.call(Request::ExecSignal(request), &[]).unwrap();
    }

    /// Starts a file operation.
    pub(crate) fn file(&mut self, user: &str, path: &str, op: FileOp) -> FileSocket {
        self.file_bytes(user, path.as_bytes(), op)
    }

    pub(crate) fn file_bytes(&mut self, user: &str, path: &[u8], op: FileOp) -> FileSocket {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let call = FileCall { user: user.into(), path: path.to_vec(), op: Some(op) };
        self.call(Request::File(call), &[theirs.into()]).unwrap();
        FileSocket(Frames::new(ours))
    }
}

/// Our side of a file operation.
pub(crate) struct FileSocket(Frames);

impl FileSocket {
    /// The next answer.
    pub(crate) fn reply(&mut self) -> Result<(FileReply, Vec<OwnedFd>), GuestError> {
        let mut reply: FileReply = self.0.next().expect("the file child answers");
        let fds = self.0.take_fds(reply.fds);
        match reply.error.take() {
            Some(error) => Err(error),
            None => Ok((reply, fds)),
        }
    }

    /// No more answers come.
    pub(crate) fn is_closed(&mut self) -> bool {
        self.0.next::<FileReply>().is_none()
    }

    /// Commits a write.
    pub(crate) fn commit(&mut self) {
        self.0.send_bytes(&[1], &[]);
    }

    /// All listed files.
    pub(crate) fn all(&mut self) -> Result<(Vec<guest::FileInfo>, bool), GuestError> {
        let mut files = Vec::new();
        loop {
            let (reply, _) = self.reply()?;
            files.extend(reply.files);
            if reply.last {
                return Ok((files, reply.truncated));
            }
        }
    }
}
