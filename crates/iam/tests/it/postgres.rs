//! A PostgreSQL of the test's own, from the system's package, in a directory that goes with it.

use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use tempfile::TempDir;

pub struct Postgres {
    bin: PathBuf,
    directory: TempDir,
    server: Child,
    port: u16,
}

/// Where the package keeps the newest version's programs.
fn bin() -> PathBuf {
    let versions = std::fs::read_dir("/usr/lib/postgresql")
        .unwrap_or_else(|error| panic!("PostgreSQL is missing ({error}): run scripts/deps test"));
    let newest = versions.map(|entry| entry.unwrap().path()).max().unwrap();
    newest.join("bin")
}

/// It refuses to run as root.
fn command(bin: &Path, program: &str) -> Command {
    let mut command = Command::new(bin.join(program));
    if rustix::process::getuid().is_root() {
        let id = |flag: &str| {
            let output = Command::new("id").args([flag, "postgres"]).output().unwrap();
            String::from_utf8(output.stdout).unwrap().trim().parse().unwrap()
        };
        command.uid(id("-u")).gid(id("-g"));
    }
    command
}

impl Postgres {
    pub fn start() -> Self {
        let bin = bin();
        let directory = tempfile::Builder::new().prefix("dsec-pg-").tempdir_in("/tmp").unwrap();
        let home = directory.path();
        let open = std::fs::Permissions::from_mode(0o777);
        std::fs::set_permissions(home, open).unwrap();
        let data = home.join("data");
        let made = command(&bin, "initdb")
            .args(["--auth=trust", "--username=dsec", "--no-sync", "--encoding=UTF8", "--locale=C", "-D"])
            .arg(&data)
            .stdout(Stdio::null())
            .status()
            .unwrap();
        assert!(made.success());
        let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let server = command(&bin, "postgres")
            .args(["-h", "127.0.0.1", "-c", "fsync=off", "-p", &port.to_string(), "-k"])
            .arg(home)
            .arg("-D")
            .arg(&data)
            .stdout(Stdio::null())
            .stderr(std::fs::File::create(home.join("log")).unwrap())
            .spawn()
            .unwrap();
        let postgres = Self { bin, directory, server, port };
        let began = Instant::now();
        while !postgres.psql("SELECT 1") {
            assert!(began.elapsed() < Duration::from_secs(60), "PostgreSQL does not answer");
            std::thread::sleep(Duration::from_millis(50));
        }
        postgres
    }

    fn psql(&self, statement: &str) -> bool {
        let status = Command::new(self.bin.join("psql"))
            .args(["-q", "-h", "127.0.0.1", "-U", "dsec", "-d", "postgres", "-p", &self.port.to_string()])
            .args(["-c", statement])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .status();
        status.unwrap().success()
    }

    /// A new database.
    pub fn database(&self, name: &str) -> String {
        assert!(self.psql(&format!("CREATE DATABASE {name}")));
        format!("postgres://dsec@127.0.0.1:{}/{name}", self.port)
    }
}

impl Drop for Postgres {
    fn drop(&mut self) {
        // An immediate shutdown: its children end with it.
        let pid = rustix::process::Pid::from_child(&self.server);
        let _ = rustix::process::kill_process(pid, rustix::process::Signal::QUIT);
        let _ = self.server.wait();
        let _ = self.directory.path();
    }
}
