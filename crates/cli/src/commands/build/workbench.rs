//! The sandbox of one step: what is done in it, and the layer that it becomes.

use std::ffi::OsStr;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::time::Duration;

use dsec_model::{ErrorKind, SandboxId};
use dsec_proto::guest;
use dsec_proto::rest::{
    CreateSandboxRequest, Exec, ExecRequest, ExecState, INLINE_MAX, ImageSettings, PackRequest, Packed,
};
use dsec_recipe::{Command, Key, Step};
use indicatif::ProgressBar;

use super::directory::{Content, DIRECTORY_MODE, Digest};
use crate::client::{ClientError, Offsets, Transfer};
use crate::commands::Context;
use crate::commands::archive::{body, pieces_by};
use crate::commands::exec::{FOLLOWED_OUTPUT_MAX, WAIT, exit_code, explain};
use crate::commands::input::Input;
use crate::commands::pack::PACK_MAX;
use crate::commands::signals::{Asked, Signals};
use crate::commands::stream::{Ending, Followed, follow};
use crate::failure::Failure;
use crate::render;

/// Who copies and makes directories.
const ROOT: &str = "0:0";
/// End of a command's output that is told of one that failed and was not followed.
const OUTPUT_TOLD: usize = 4 << 10;

/// Where a step is done. Whoever makes it ends it or leaves it.
pub(super) struct Workbench<'a> {
    context: &'a Context,
    /// The sandbox.
    pub(super) id: SandboxId,
}

/// How a command went that was not to fail.
pub(super) enum Ran {
    /// It ended with 0.
    Well,
    /// It ended with another code, or could not be started; the end of its output where nobody saw it.
    Badly {
        /// The code.
        code: u8,
        /// Why it did not start, if it did not.
        why: Option<Failure>,
        /// What it wrote last.
        output: String,
    },
    /// We were told to end.
    Told(Asked),
    /// Nobody reads our output.
    ReaderGone,
}

/// What is copied where.
pub(super) struct Copied {
    /// As it was planned with.
    pub(super) content: Vec<(Content, Digest)>,
    /// As the recipe has it, absolute.
    pub(super) to: String,
    /// `user[:group]`.
    pub(super) owner: Option<String>,
    /// Of files.
    pub(super) mode: Option<u32>,
}

impl<'a> Workbench<'a> {
    /// Makes the sandbox, and says which image it is of. A create that is under way runs to its end on the node whatever we do: this is not to be dropped.
    pub(super) async fn make(
        context: &'a Context,
        request: &CreateSandboxRequest,
    ) -> Result<(Self, String), ClientError> {
        // Commands say whom they run as and where: what the image says may not be there yet.
        let request = CreateSandboxRequest {
            init_user: Some("root".to_owned()),
            cwd: Some("/".to_owned()),
            ..request.clone()
        };
        let sandbox = context.client.create(&request).await?;
        Ok((Self { context, id: sandbox.id }, sandbox.image_digest))
    }

    /// Ends the sandbox.
    pub(super) async fn end(self) -> Result<(), Failure> {
        match self.context.client.stop(&self.id, 0).await {
            Ok(_) => Ok(()),
            Err(error) if error.kind() == Some(ErrorKind::NotFound) => Ok(()),
            Err(error) => Err(Failure::new(format!("the sandbox {} could not be ended: {error}", self.id))
                .hint(format!("end it with `dsec stop {}`; its idle time limit ends it otherwise", self.id))),
        }
    }

    /// Runs a step's command, in a directory that is made when missing.
    pub(super) async fn run(
        &self,
        step: &Step,
        command: &Command,
        (dir, user): (&str, &str),
        quiet: bool,
        signals: &mut Signals,
    ) -> Result<Ran, Failure> {
        self.make_directory(dir, Some(user)).await?;
        let mut request = ExecRequest {
            env: step.env.clone(),
            cwd: Some(dir.to_owned()),
            user: Some(user.to_owned()),
            output_limit_bytes: Some(FOLLOWED_OUTPUT_MAX),
            ..ExecRequest::default()
        };
        match command {
            Command::Shell(line) => request.shell = Some(line.clone()),
            Command::Argv(argv) => request.argv.clone_from(argv),
        }
        let client = &self.context.client;
        let started = match client.exec(&self.id, &request).await {
            Ok(started) => started,
            Err(error) => {
                let failure = Failure::from(error);
                return match failure.detail["reason"].as_str() {
                    Some(guest::PROGRAM_NOT_FOUND | guest::PROGRAM_NOT_EXECUTABLE) => Ok(Ran::Badly {
                        code: failure.command_code(),
                        why: Some(failure),
                        output: String::new(),
                    }),
                    _ => Err(failure),
                };
            }
        };
        let exec = if quiet {
            loop {
                let exec = tokio::select! {
                    exec = client.exec_wait(&self.id, &started.id, WAIT, INLINE_MAX) => exec?,
                    asked = signals.next() => return Ok(Ran::Told(asked)),
                };
                if exec.state == ExecState::Exited {
                    break exec;
                }
            }
        } else {
            // Our signals end the build and with it the sandbox: the command need not hear of them.
            let followed = Followed {
                client,
                sandbox: &self.id,
                exec: &started.id,
                from: Offsets::default(),
                stays: true,
            };
            match follow(&followed, Input::None, signals).await? {
                Ending::Exited(exec) => *exec,
                Ending::Told(asked) => return Ok(Ran::Told(asked)),
                Ending::ReaderGone => return Ok(Ran::ReaderGone),
                Ending::Left => return Ok(Ran::Told(Asked::HangUp)),
            }
        };
        if !quiet {
            explain(&exec);
        }
        match exit_code(&exec)? {
            0 => Ok(Ran::Well),
            code => Ok(Ran::Badly {
                code,
                why: None,
                output: if quiet { last_output(&exec) } else { String::new() },
            }),
        }
    }

    /// Copies what a step copies.
    ///
    /// # Errors
    /// It is not what the build was planned with any more.
    pub(super) async fn copy(&self, copied: Copied) -> Result<(), Failure> {
        let Copied { content, to, owner, mode } = copied;
        let to_directory = to.ends_with('/')
            || to.ends_with("/.")
            || content.len() > 1
            || content.iter().any(|(content, _)| content.file_name.is_none())
            || self.find(&to).await? == Found::Directory;
        let to = clean(&to);
        let (dir, file_name) = match to_directory {
            true => (to, None),
            false => {
                (to.parent().unwrap_or(Path::new("/")).to_owned(), to.file_name().map(OsStr::to_os_string))
            }
        };
        let (there, missing) = self.way_to(&dir).await?;
        let (tell, digests) = mpsc::channel();
        let planned: Vec<Digest> = content.iter().map(|(_, digest)| *digest).collect();
        let archive = pieces_by(move |out| {
            let mut archive = tar::Builder::new(out);
            add_directories(&mut archive, &missing)?;
            let below: PathBuf = missing.last().cloned().unwrap_or_default();
            for (mut content, _) in content {
                if file_name.is_some() {
                    content.file_name.clone_from(&file_name);
                }
                // Whoever waited may have been told to end.
                let _ = tell.send(content.add_to(&mut archive, &below, mode)?);
            }
            archive.into_inner()?.flush()
        });
        self.unpack(&there, owner.as_deref(), body(archive, ProgressBar::hidden())).await?;
        if digests.iter().collect::<Vec<_>>() != planned {
            return Err(Failure::new("what is copied has changed since the build began").hint("build again"));
        }
        Ok(())
    }

    /// Makes a directory for `owner` with those above it, where it is missing.
    pub(super) async fn make_directory(&self, dir: &str, owner: Option<&str>) -> Result<(), Failure> {
        let (there, missing) = self.way_to(&clean(dir)).await?;
        if missing.is_empty() {
            return Ok(());
        }
        let archive = pieces_by(move |out| {
            let mut archive = tar::Builder::new(out);
            add_directories(&mut archive, &missing)?;
            archive.into_inner()?.flush()
        });
        self.unpack(&there, owner, body(archive, ProgressBar::hidden())).await
    }

    async fn unpack(&self, into: &Path, owner: Option<&str>, body: reqwest::Body) -> Result<(), Failure> {
        let query = [
            ("path", into.display().to_string()),
            ("owner", owner.unwrap_or(ROOT).to_owned()),
            ("user", ROOT.to_owned()),
        ];
        self.context.client.write(&self.id, Transfer::Archive, &query, body, None).await?;
        Ok(())
    }

    /// Of the way to a directory, what is there, and below that each one that is missing.
    async fn way_to(&self, dir: &Path) -> Result<(PathBuf, Vec<PathBuf>), Failure> {
        let mut there = dir;
        loop {
            match self.find(&there.display().to_string()).await? {
                Found::Directory => break,
                Found::Nothing => {}
                Found::Other => {
                    return Err(Failure::new(format!(
                        "{} is there in the sandbox and is no directory",
                        there.display()
                    )));
                }
            }
            match there.parent() {
                Some(parent) => there = parent,
                None => break,
            }
        }
        let below = dir.strip_prefix(there).unwrap_or(Path::new(""));
        let mut missing: Vec<PathBuf> =
            below.ancestors().filter(|path| !path.as_os_str().is_empty()).map(Path::to_owned).collect();
        missing.reverse();
        Ok((there.to_owned(), missing))
    }

    async fn find(&self, path: &str) -> Result<Found, Failure> {
        let is_nothing = |error: &ClientError| {
            matches!(error.kind(), Some(ErrorKind::NotFound | ErrorKind::InvalidArgument))
        };
        let client = &self.context.client;
        match client.stat(&self.id, &format!("{}/.", path.trim_end_matches('/')), Some(ROOT)).await {
            Ok(_) => return Ok(Found::Directory),
            Err(error) if is_nothing(&error) => {}
            Err(error) => return Err(error.into()),
        }
        match client.stat(&self.id, path, Some(ROOT)).await {
            Ok(_) => Ok(Found::Other),
            Err(error) if is_nothing(&error) => Ok(Found::Nothing),
            Err(error) => Err(error.into()),
        }
    }

    /// Makes a layer of all that there is now, which is found by `key`: of a step's, or with `config` an image.
    pub(super) async fn pack(&self, key: &Key, config: Option<ImageSettings>) -> Result<Packed, Failure> {
        let kind = if config.is_some() { "base" } else { "workspace" };
        let request = PackRequest {
            step: Some(key.to_string()),
            kind: kind.to_owned(),
            // What a recipe says is to be there is there.
            scrub: Some(Vec::new()),
            config,
            ..PackRequest::default()
        };
        let limit: Duration = self.context.global.timeout.unwrap_or(PACK_MAX);
        Ok(self.context.client.pack(&self.id, &request, limit).await?)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Found {
    Directory,
    Other,
    Nothing,
}

/// An absolute path without `.`, `..` and empty parts.
fn clean(path: &str) -> PathBuf {
    let mut clean = PathBuf::from("/");
    for part in path.split('/') {
        match part {
            "" | "." => {}
            ".." => drop(clean.pop()),
            part => clean.push(part),
        }
    }
    clean
}

fn add_directories(archive: &mut tar::Builder<impl Write>, missing: &[PathBuf]) -> std::io::Result<()> {
    for dir in missing {
        let mut header = tar::Header::new_gnu();
        header.set_entry_type(tar::EntryType::Directory);
        header.set_mode(DIRECTORY_MODE);
        header.set_mtime(render::now_ms() / 1000);
        header.set_size(0);
        archive.append_data(&mut header, dir, std::io::empty())?;
    }
    Ok(())
}

fn last_output(exec: &Exec) -> String {
    let both = [&exec.stdout, &exec.stderr].into_iter().flatten().map(String::as_str).collect::<String>();
    let from = (both.len().saturating_sub(OUTPUT_TOLD)..).find(|at| both.is_char_boundary(*at));
    both[from.unwrap_or(both.len())..].to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_is_cleaned_by_its_text() {
        for (path, wanted) in [("/a/./b//c/", "/a/b/c"), ("/a/../../b", "/b"), ("/", "/"), ("/..", "/")] {
            assert_eq!(clean(path), Path::new(wanted), "{path}");
        }
    }
}
