//! `dsec cp`: files and directories between here and a sandbox.

use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use clap::{Args, CommandFactory};
use clap_complete::engine::ArgValueCompleter;
use dsec_model::{ErrorKind, SandboxId};
use dsec_proto::rest::{FileInfo, FileKind};
use futures_util::{Stream, StreamExt};
use indicatif::ProgressBar;
use reqwest::Body;

use super::archive::{Owner, Unpacked, body, pieces_of, tar_of, unpack};
use super::landing::{Part, RemotePart};
use super::signals::Signals;
use super::{Context, completion, progress};
use crate::client::{ClientError, Transfer};
use crate::failure::{Failure, Outcome};
use crate::parse::{self, Place};
use crate::render;

pub(crate) const EXAMPLES: &str = "\
Examples:
  dsec cp ./fix.patch sb-n1-abc:/tmp/           into a directory
  dsec cp ./src sb-n1-abc:/work/src             a directory
  dsec cp sb-n1-abc:/var/log/app.log ./app.log
  dsec cp sb-n1-abc:/etc - | tar tv             a directory, as a tar
  date | dsec cp - sb-n1-abc:/tmp/now           a file from standard input

As with cp: into a directory that is there, the source goes under its own name.";

/// `dsec cp`.
#[derive(Debug, Args)]
pub(crate) struct CpArgs {
    /// What: a path, ID:/path, or - for standard input (a file, or for a directory a tar)
    #[arg(value_parser = parse::place, add = ArgValueCompleter::new(completion::places))]
    source: Place,
    /// Where to: a path, ID:/path, or - for standard output (a directory comes as a tar)
    #[arg(value_parser = parse::place, add = ArgValueCompleter::new(completion::places))]
    target: Place,
    /// Make missing parent directories in the sandbox
    #[arg(long, short = 'p')]
    parents: bool,
    /// Act with this user's rights in the sandbox
    #[arg(long, short = 'u', value_name = "USER")]
    user: Option<String>,
    /// No progress
    #[arg(long, short = 'q')]
    quiet: bool,
}

struct Copy<'a> {
    context: &'a Context,
    sandbox: SandboxId,
    path: String,
    user: Option<String>,
    parents: bool,
    quiet: bool,
    part: &'a RemotePart,
}

/// Copies one way or the other.
pub(crate) async fn cp(context: &Context, args: CpArgs) -> Outcome {
    let quiet = args.quiet || context.global.json;
    let part = RemotePart::default();
    let (user, parents) = (args.user, args.parents);
    let side = |sandbox, path| Copy { context, sandbox, path, user, parents, quiet, part: &part };
    let to_stdout = args.target == Place::Stdio;
    let mut signals = Signals::new()?;
    let copy = async {
        match (args.source, args.target) {
            (Place::Remote { sandbox, path }, Place::Stdio) => side(sandbox, path).download_to_stdout().await,
            (Place::Remote { sandbox, path }, Place::Local(to)) => side(sandbox, path).download(&to).await,
            (Place::Stdio, Place::Remote { sandbox, path }) => side(sandbox, path).upload_stdin().await,
            (Place::Local(from), Place::Remote { sandbox, path }) => side(sandbox, path).upload(&from).await,
            (Place::Remote { .. }, Place::Remote { .. }) => {
                wrong_usage("both sides are in a sandbox; one of them must be here (- is a pipe)")
            }
            _ => wrong_usage("neither side is in a sandbox; write one of them as ID:/path"),
        }
    };
    let done = tokio::select! {
        done = copy => done,
        // The copy is dropped, and with it what it had half written here.
        asked = signals.next() => {
            tokio::select! {
                () = part.remove(context) => {}
                _ = signals.next() => {}
            }
            return Ok(asked.exit_code());
        }
    };
    if done.is_err() {
        part.remove(context).await;
    }
    let done = done?;
    if context.global.json && !to_stdout {
        render::json(&done)?;
    }
    Ok(0)
}

fn wrong_usage(message: &str) -> ! {
    crate::cli::Cli::command().error(clap::error::ErrorKind::ValueValidation, message).exit()
}

impl Copy<'_> {
    fn query(&self, path: &str) -> Vec<(&'static str, String)> {
        let mut query = vec![("path", path.to_owned())];
        query.extend(self.user.iter().map(|user| ("user", user.clone())));
        query
    }

    async fn stat(&self, path: &str) -> Result<FileInfo, ClientError> {
        self.context.client.stat(&self.sandbox, path, self.user.as_deref()).await
    }

    /// What the path leads to, through a link too. `None`: nothing is there.
    async fn remote_kind(&self) -> Result<Option<FileInfo>, ClientError> {
        let info = match self.stat(&self.path).await {
            Ok(info) => info,
            Err(error) if error.kind() == Some(ErrorKind::NotFound) => {
                // A sandbox that is not there is not a file that is not there.
                self.context.client.sandbox(&self.sandbox).await?;
                return Ok(None);
            }
            Err(error) => return Err(error),
        };
        if info.kind != FileKind::Symlink {
            return Ok(Some(info));
        }
        match self.stat(&format!("{}/.", self.path)).await {
            Ok(directory) => Ok(Some(directory)),
            // A link to a file: its size and mode are its own, and not the file's.
            Err(_) => Ok(Some(FileInfo { size: 0, mode: 0o644, ..info })),
        }
    }

    async fn remote(&self) -> Result<FileInfo, Failure> {
        match self.remote_kind().await? {
            Some(info) => Ok(info),
            None => Err(Failure::new(format!("{}:{} is not there", self.sandbox, self.path))),
        }
    }

    /// Bytes of a file or a tar of a directory out of the sandbox.
    async fn open(
        &self,
        info: &FileInfo,
    ) -> Result<(impl Stream<Item = Result<bytes::Bytes, ClientError>> + use<>, ProgressBar), Failure> {
        let what = if info.kind == FileKind::Directory { Transfer::Archive } else { Transfer::File };
        let response =
            self.context.client.read(&self.sandbox, what, &self.path, self.user.as_deref()).await?;
        let bar = progress::bytes(&self.path, response.content_length(), self.quiet);
        Ok((self.context.client.body(response), bar))
    }

    async fn download_to_stdout(&self) -> Result<Unpacked, Failure> {
        let info = self.remote().await?;
        let (stream, bar) = self.open(&info).await?;
        let bytes = save(stream, &mut std::io::stdout().lock(), "standard output", &bar).await?;
        bar.finish_and_clear();
        Ok(Unpacked { files: 1, bytes })
    }

    async fn download(&self, to: &Path) -> Result<Unpacked, Failure> {
        let info = self.remote().await?;
        let name = self.path.trim_end_matches('/').rsplit('/').next().unwrap_or_default();
        let own_name = !matches!(name, "" | "." | "..");
        let target = if to.is_dir() && own_name { to.join(name) } else { to.to_owned() };
        if info.kind == FileKind::Directory && target.exists() && !target.is_dir() {
            return Err(Failure::new(format!("{} is there and is no directory", target.display())));
        }
        let (stream, bar) = self.open(&info).await?;
        let done = if info.kind == FileKind::Directory {
            unpack(stream, target, bar.clone()).await?
        } else {
            save_file(stream, &target, info.mode, &bar).await?
        };
        bar.finish_and_clear();
        Ok(done)
    }

    async fn upload_stdin(&self) -> Result<Unpacked, Failure> {
        let directory = self.is_directory().await?;
        let bar = progress::bytes("standard input", None, self.quiet);
        let body = body(pieces_of(std::io::stdin()), bar.clone());
        let done = if directory {
            self.upload_archive(&self.path, body).await?
        } else {
            self.upload_file(&self.path, None, body, None).await?
        };
        bar.finish_and_clear();
        Ok(done)
    }

    async fn upload(&self, from: &Path) -> Result<Unpacked, Failure> {
        let failed = |error| Failure::io(format!("cannot read {}", from.display()), &error);
        let meta = std::fs::metadata(from).map_err(failed)?;
        let target = match (self.is_directory().await?, from.file_name()) {
            (true, Some(name)) => {
                let name = name.to_str().ok_or_else(|| {
                    Failure::new(format!("the name of {} is not UTF-8", from.display()))
                        .hint("give the whole path in the sandbox")
                })?;
                format!("{}/{name}", self.path.trim_end_matches('/'))
            }
            _ => self.path.clone(),
        };
        if meta.is_dir() {
            let bar = progress::bytes(&from.display().to_string(), None, self.quiet);
            let body = body(tar_of(from.to_owned(), Owner::Root), bar.clone());
            let done = self.upload_tree(&target, body).await;
            bar.finish_and_clear();
            return done;
        }
        let file = File::open(from).map_err(failed)?;
        // The size of a pipe or a device says nothing.
        let length = meta.is_file().then_some(meta.len());
        let bar = progress::bytes(&from.display().to_string(), length, self.quiet);
        let body = body(pieces_of(file.take(length.unwrap_or(u64::MAX))), bar.clone());
        let mode = meta.permissions().mode() & 0o777;
        let done = self.upload_file(&target, Some(mode), body, length).await?;
        bar.finish_and_clear();
        Ok(done)
    }

    async fn is_directory(&self) -> Result<bool, Failure> {
        let kind = self.remote_kind().await?.map(|info| info.kind);
        Ok(kind == Some(FileKind::Directory) || (kind.is_none() && self.path.ends_with('/')))
    }

    async fn upload_file(
        &self,
        path: &str,
        mode: Option<u32>,
        body: Body,
        length: Option<u64>,
    ) -> Result<Unpacked, Failure> {
        let mut query = self.query(path);
        query.extend(mode.map(|mode| ("mode", format!("{mode:04o}"))));
        // A path that ends in a slash asks for the directory as well.
        if self.parents || self.path.ends_with('/') {
            query.push(("parents", "true".to_owned()));
        }
        let client = &self.context.client;
        let response = client.write(&self.sandbox, Transfer::File, &query, body, length).await?;
        let info: FileInfo = answer(response).await?;
        Ok(Unpacked { files: 1, bytes: info.size })
    }

    /// A tree that is new is seen at its place once it is whole; one that is there is added to.
    async fn upload_tree(&self, target: &str, body: Body) -> Result<Unpacked, Failure> {
        match self.stat(target).await {
            Err(error) if error.kind() == Some(ErrorKind::NotFound) => {}
            _ => return self.upload_archive(target, body).await,
        }
        let beside = self.part.beside(&self.sandbox, target, self.user.as_deref());
        let done = self.upload_archive(&beside, body).await?;
        self.part.land(self.context, target).await?;
        Ok(done)
    }

    async fn upload_archive(&self, path: &str, body: Body) -> Result<Unpacked, Failure> {
        #[derive(serde::Deserialize)]
        struct Answer {
            files: u64,
            bytes: u64,
        }
        let client = &self.context.client;
        let response = client.write(&self.sandbox, Transfer::Archive, &self.query(path), body, None).await?;
        let done: Answer = answer(response).await?;
        Ok(Unpacked { files: done.files, bytes: done.bytes })
    }
}

async fn answer<T: serde::de::DeserializeOwned>(response: reqwest::Response) -> Result<T, Failure> {
    response.json().await.map_err(|error| Failure::new(format!("the platform's answer is unclear: {error}")))
}

async fn save(
    stream: impl Stream<Item = Result<bytes::Bytes, ClientError>>,
    to: &mut impl Write,
    name: &str,
    bar: &ProgressBar,
) -> Result<u64, Failure> {
    let mut stream = std::pin::pin!(stream);
    let mut bytes = 0;
    while let Some(piece) = stream.next().await {
        let piece = piece?;
        to.write_all(&piece).map_err(|error| Failure::io(format!("cannot write {name}"), &error))?;
        bytes += piece.len() as u64;
        bar.inc(piece.len() as u64);
    }
    to.flush().map_err(|error| Failure::io(format!("cannot write {name}"), &error))?;
    Ok(bytes)
}

/// Writes beside the target and moves it there at the end: a copy that breaks off leaves what was.
async fn save_file(
    stream: impl Stream<Item = Result<bytes::Bytes, ClientError>>,
    target: &Path,
    mode: u32,
    bar: &ProgressBar,
) -> Result<Unpacked, Failure> {
    let name = target.display().to_string();
    let failed = |error: std::io::Error| Failure::io(format!("cannot write {name}"), &error);
    if target.metadata().is_ok_and(|meta| !meta.is_file()) {
        let mut device = File::options().write(true).open(target).map_err(failed)?;
        return Ok(Unpacked { files: 1, bytes: save(stream, &mut device, &name, bar).await? });
    }
    let part = Part::beside(target);
    let mut file = File::create_new(&part.path).map_err(failed)?;
    let bytes = save(stream, &mut file, &name, bar).await?;
    file.set_permissions(PermissionsExt::from_mode(mode & 0o777)).map_err(failed)?;
    std::fs::rename(&part.path, target).map_err(failed)?;
    Ok(Unpacked { files: 1, bytes })
}
