//! What `import` needs to name an image of a registry. The node gets it; this program never connects there.

use std::path::PathBuf;

use clap::Args;
use dsec_proto::rest::{PullRequest, REGISTRY_UNAUTHORIZED, RegistryCredentials};

use super::authfile::{self, Found};
use crate::failure::{Failure, plain};
use crate::terminal;

/// What sources in a registry begin with.
pub(crate) const SCHEME: &str = "docker://";
/// Longest line of `--creds-stdin`, bytes.
const CREDS_MAX: u64 = 64 << 10;

/// Options of an import from a registry.
#[derive(Debug, Args)]
#[command(next_help_heading = "For docker:// sources")]
pub(crate) struct RegistryArgs {
    /// Of an image for several platforms, this one: linux/ARCHITECTURE[/VARIANT] [default: the node's]
    #[arg(long, value_name = "PLATFORM")]
    platform: Option<String>,
    /// What to show the registry when it asks; without PASS it is asked for here
    #[arg(long, value_name = "USER[:PASS]", conflicts_with = "creds_stdin", hide_env_values = true)]
    creds: Option<String>,
    /// Read USER:PASS from standard input
    #[arg(long)]
    creds_stdin: bool,
    /// A config file of docker's with credentials [default: $DOCKER_CONFIG/config.json or
    /// ~/.docker/config.json]
    #[arg(long, value_name = "PATH", conflicts_with_all = ["creds", "creds_stdin"])]
    authfile: Option<PathBuf>,
    /// Speak HTTP without TLS; to localhost and loopback addresses that is done anyway
    #[arg(long, conflicts_with = "cacert")]
    plain_http: bool,
    /// PEM file of certificates that the node is to trust beside its own
    #[arg(long, value_name = "PATH")]
    cacert: Option<PathBuf>,
}

/// Where credentials were looked for.
#[derive(Debug)]
pub(crate) struct Looked {
    /// With a helper that was not asked.
    helper: Option<(PathBuf, String)>,
}

impl Looked {
    /// Says of a refusal what this program knows of it.
    pub(crate) fn explain(&self, failure: Failure) -> Failure {
        if failure.detail["reason"] != REGISTRY_UNAUTHORIZED {
            return failure;
        }
        match &self.helper {
            Some((file, helper)) => failure.hint(format!(
                "{} leaves the credentials to the helper {helper}, which is not asked; give --creds or --creds-stdin",
                file.display()
            )),
            None => failure.hint("give --creds, --creds-stdin, or an --authfile that has the registry"),
        }
    }
}

impl RegistryArgs {
    /// Refuses options that another source has no use for.
    pub(crate) fn refuse(&self) -> Result<(), Failure> {
        let given = [
            ("--platform", self.platform.is_some()),
            ("--creds", self.creds.is_some()),
            ("--creds-stdin", self.creds_stdin),
            ("--authfile", self.authfile.is_some()),
            ("--plain-http", self.plain_http),
            ("--cacert", self.cacert.is_some()),
        ];
        match given.iter().find(|(_, is_given)| *is_given) {
            Some((option, _)) => {
                Err(Failure::usage(format!("{option} is for sources that begin with {SCHEME}")))
            }
            None => Ok(()),
        }
    }

    /// The request for `reference`, and where its credentials were looked for.
    pub(crate) fn request(&self, reference: &str) -> Result<(PullRequest, Looked), Failure> {
        let mut looked = Looked { helper: None };
        let credentials = match (&self.creds, self.creds_stdin) {
            (Some(creds), _) => Some(given(creds)?),
            (None, true) => Some(from_stdin()?),
            (None, false) => {
                let (file, is_named) = match &self.authfile {
                    Some(file) => (Some(file.clone()), true),
                    None => (authfile::usual(), false),
                };
                match file
                    .map(|file| authfile::look_up(&file, is_named, reference).map(|found| (file, found)))
                {
                    Some(Ok((_, Found::Credentials(credentials)))) => Some(credentials),
                    Some(Ok((file, Found::Helper(helper)))) => {
                        looked.helper = Some((file, helper));
                        None
                    }
                    Some(Ok((_, Found::Nothing))) | None => None,
                    Some(Err(failure)) => return Err(failure),
                }
            }
        };
        let ca_pem = self.cacert.as_ref().map(|path| {
            std::fs::read_to_string(path)
                .map_err(|error| Failure::io(format!("cannot read {}", path.display()), &error))
        });
        let request = PullRequest {
            reference: reference.to_owned(),
            platform: self.platform.clone(),
            credentials,
            plain_http: self.plain_http,
            ca_pem: ca_pem.transpose()?,
        };
        Ok((request, looked))
    }
}

fn given(creds: &str) -> Result<RegistryCredentials, Failure> {
    match creds.split_once(':') {
        Some((user, password)) => Ok(password_of(user, password)),
        None => Ok(password_of(creds, &terminal::secret(&format!("Password of {creds}"))?)),
    }
}

fn from_stdin() -> Result<RegistryCredentials, Failure> {
    use std::io::Read as _;
    let mut text = String::new();
    let read = std::io::stdin().take(CREDS_MAX).read_to_string(&mut text);
    read.map_err(|error| {
        Failure::usage(format!("--creds-stdin: cannot read standard input: {}", plain(&error)))
    })?;
    let (user, password) = text
        .trim_end_matches(['\r', '\n'])
        .split_once(':')
        .ok_or_else(|| Failure::usage("--creds-stdin: standard input is not USER:PASS"))?;
    Ok(password_of(user, password))
}

fn password_of(user: &str, password: &str) -> RegistryCredentials {
    let (username, password) = (Some(user.to_owned()), Some(password.to_owned()));
    RegistryCredentials { username, password, ..RegistryCredentials::default() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_password_may_have_colons() {
        let found = given("ann:a:b").unwrap();
        assert_eq!((found.username.as_deref(), found.password.as_deref()), (Some("ann"), Some("a:b")));
    }
}
