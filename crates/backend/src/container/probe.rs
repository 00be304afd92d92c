//! Tries what containers need of this host, on the spot and without leaving anything. A version number
//! or a file's presence proves nothing: each probe does the thing.

use std::fs;
use std::io;
use std::process::Command;

use dsec_sys::cgroup::{CpuLimits, Group, GroupLimits, Hierarchies, Tree};
use dsec_sys::memfd;
use dsec_sys::mount::{Attr, FsSetting, new_mount};

/// One feature, tried.
#[derive(Debug, Clone)]
pub struct Probe {
    /// Its name.
    pub name: &'static str,
    /// What it is for.
    pub purpose: &'static str,
    /// `Ok`: works, with what was seen. `Err`: what was seen.
    pub found: Result<String, String>,
    /// No container can run without it.
    pub needed: bool,
    /// How to get it.
    pub remedy: &'static str,
}

pub(super) fn all() -> Vec<Probe> {
    let probe = |name, purpose, needed, remedy, found: io::Result<String>| Probe {
        name,
        purpose,
        found: found.map_err(|e| e.to_string()),
        needed,
        remedy,
    };
    vec![
        probe("root", "namespaces, mounts and cgroups of sandboxes", true, "run as root", root()),
        probe(
            "cgroups",
            "limits of memory, CPU and processes",
            true,
            "mount cgroup version 2 (systemd does), or version 1 with memory, cpu and pids",
            cgroups(),
        ),
        probe(
            "cgroup v2 kill",
            "time limits that end a command's whole process tree",
            false,
            "Linux 5.14 or newer with cgroup version 2 mounted, also beside version 1",
            cgroup_kill(),
        ),
        probe(
            "idle groups",
            "best-effort sandboxes take no processor time that others want",
            false,
            "Linux 5.15 with CONFIG_FAIR_GROUP_SCHED",
            idle_groups(),
        ),
        probe(
            "user namespaces",
            "root in a sandbox is nobody on the host",
            true,
            "CONFIG_USER_NS, user.max_user_namespaces above 0, kernel.unprivileged_userns_clone at 1 (Debian) and \
             kernel.apparmor_restrict_unprivileged_userns at 0 (Ubuntu)",
            user_namespaces(),
        ),
        probe(
            "AppArmor",
            "no profile stands between the edge and what it does with the kernel",
            false,
            "unload the profile (aa-disable), or let it allow mounts, user namespaces and all capabilities",
            apparmor(),
        ),
        probe(
            "overlayfs",
            "roots of sandboxes: an image below, what they write above",
            true,
            "CONFIG_OVERLAY_FS (Linux 6.8 for layers one by one)",
            overlay(),
        ),
        probe(
            "EROFS",
            "images",
            true,
            "CONFIG_EROFS_FS and CONFIG_EROFS_FS_BACKED_BY_FILE (Linux 6.12)",
            erofs(),
        ),
        probe(
            "FUSE",
            "content of layers on demand",
            true,
            "CONFIG_FUSE_FS, as a module or built in",
            dsec_sys::fuse::open_device().map(|_| "/dev/fuse opens".to_owned()),
        ),
        probe(
            "btrfs",
            "writable layers with an exact size",
            true,
            "CONFIG_BTRFS_FS (Linux 6.7 for simple quotas)",
            file_system("btrfs"),
        ),
        probe(
            "mkfs.btrfs",
            "makes the file system of the writable layers",
            true,
            "install btrfs-progs",
            command(&["mkfs.btrfs", "--version"], "runs"),
        ),
        probe(
            "loop devices",
            "the file system of the writable layers",
            true,
            "CONFIG_BLK_DEV_LOOP",
            readable("/dev/loop-control"),
        ),
        probe(
            "sealed executable memfd",
            "the agent's program, which nobody can change or read",
            true,
            "Linux 3.17, and vm.memfd_noexec at 0",
            memfd::executable("probe", b"\x7fELF").map(|_| "one was made".to_owned()),
        ),
        probe(
            "seccomp filters",
            "system calls that a sandbox may use",
            true,
            "CONFIG_SECCOMP_FILTER",
            readable("/proc/sys/kernel/seccomp/actions_avail"),
        ),
        probe(
            "process ids",
            "more of them than all sandboxes together may use",
            false,
            "sysctl -w kernel.pid_max=4194304, and a line for it in /etc/sysctl.d",
            sysctl("kernel/pid_max").and_then(|text| process_ids(&text)),
        ),
        probe(
            "core dumps",
            "a crash in a sandbox runs nothing on the host",
            false,
            "set kernel.core_pattern to a plain file name, such as `core`",
            sysctl("kernel/core_pattern").and_then(|pattern| core_dumps(&pattern, core_limit())),
        ),
        probe(
            "socket buffers",
            "what a sandbox may let wait in one socket, which counts in nobody's memory",
            false,
            "leave net.core.rmem_max and wmem_max at 212992 where no program of the host needs more",
            sysctl("net/core/rmem_max").and_then(|text| buffers(&text)),
        ),
        probe(
            "kernel log",
            "the name of a process that was killed for memory",
            false,
            "let root read /dev/kmsg",
            readable("/dev/kmsg"),
        ),
    ]
}

fn sysctl(name: &str) -> io::Result<String> {
    Ok(fs::read_to_string(format!("/proc/sys/{name}"))?.trim().to_owned())
}

/// Most that `kernel.pid_max` can be on a 64-bit host.
const PID_MAX: u64 = 4_194_304;

fn number(text: &str) -> io::Result<u64> {
    text.parse().map_err(|_| io::Error::other(format!("{text:?} is no number")))
}

fn process_ids(pid_max: &str) -> io::Result<String> {
    let found = number(pid_max)?;
    if found >= PID_MAX {
        return Ok(format!("kernel.pid_max is {found}"));
    }
    let sandboxes = found / dsec_model::Limits::default().pids;
    Err(io::Error::other(format!(
        "kernel.pid_max is {found}: {sandboxes} sandboxes at their usual limit leave nothing to fork with"
    )))
}

fn core_limit() -> Option<u64> {
    rustix::process::getrlimit(rustix::process::Resource::Core).maximum
}

/// The kernel starts a piped handler unless the limit of core files is exactly 1 (core(5)), which commands in a sandbox
/// have and cannot change. `most` is what this process may give them. A socket (`@`, Linux 6.16) heeds no limit.
fn core_dumps(pattern: &str, most: Option<u64>) -> io::Result<String> {
    let said = format!("kernel.core_pattern is `{pattern}`");
    match pattern.chars().next() {
        Some('@') => Err(io::Error::other(format!("{said}: crashes in sandboxes reach that socket too"))),
        Some('|') if most == Some(0) => {
            Err(io::Error::other(format!("{said}, and the limit of core files here is 0, at which it runs")))
        }
        Some('|') => Ok(format!("{said}; the limit of core files in a sandbox, 1, keeps it from running")),
        _ => Ok(said),
    }
}

/// What the kernel sets where nobody asks for more.
const BUFFER_USUAL: u64 = 212_992;

fn buffers(rmem_max: &str) -> io::Result<String> {
    let (found, said) = (number(rmem_max)?, format!("net.core.rmem_max is {rmem_max}"));
    if found > BUFFER_USUAL { Err(io::Error::other(said)) } else { Ok(said) }
}

fn root() -> io::Result<String> {
    if rustix::process::geteuid().is_root() {
        Ok("uid 0".to_owned())
    } else {
        Err(io::Error::other("not root"))
    }
}

fn cgroups() -> io::Result<String> {
    Ok(match Hierarchies::find()? {
        Hierarchies::V2(root) => format!("version 2 at {}", root.display()),
        Hierarchies::V1 { unified: Some(_), .. } => {
            "hybrid: controllers on version 1, version 2 beside them".to_owned()
        }
        Hierarchies::V1 { unified: None, .. } => "version 1".to_owned(),
    })
}

/// Looks at a group that is made for it.
fn in_a_group<T>(look: impl FnOnce(&Group) -> io::Result<T>) -> io::Result<T> {
    let tree = Tree::set_up(&format!("probe{}", std::process::id()))?;
    let group = tree.group("probe");
    let cpu = CpuLimits { millis: 100, burst_ms: 0, weight: 100, idle: false };
    let found =
        group.create(&GroupLimits { memory_bytes: 64 << 20, cpu, pids: 16 }).and_then(|()| look(&group));
    group.remove().and_then(|()| tree.remove())?;
    found
}

fn cgroup_kill() -> io::Result<String> {
    in_a_group(|group| group.create_run(0, 0))?
        .map(|_| "cgroup.kill opened".to_owned())
        .ok_or_else(|| io::Error::other("cgroup version 2 is not mounted"))
}

fn idle_groups() -> io::Result<String> {
    if in_a_group(|group| Ok(group.can_be_idle()))? {
        Ok("a group has cpu.idle".to_owned())
    } else {
        Err(io::Error::other("groups have no cpu.idle: best effort is the least weight"))
    }
}

fn command(argv: &[&str], seen: &str) -> io::Result<String> {
    let output = Command::new(argv[0]).args(&argv[1..]).output().map_err(|e| match e.kind() {
        io::ErrorKind::NotFound => io::Error::new(e.kind(), format!("no program {}", argv[0])),
        _ => e,
    })?;
    if output.status.success() {
        Ok(seen.to_owned())
    } else {
        Err(io::Error::other(String::from_utf8_lossy(&output.stderr).trim().to_owned()))
    }
}

/// As the launcher makes them: an unprivileged id makes one, is privileged in it, and makes another there. Root may do so
/// where unprivileged ids may not (Debian's switch, Ubuntu's AppArmor), so root's success would prove nothing.
fn user_namespaces() -> io::Result<String> {
    let unprivileged = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"];
    let outer = ["unshare", "--user", "--map-root-user", "--mount"];
    let inner = ["unshare", "--user", "--map-root-user", "true"];
    command(&[&unprivileged[..], &outer, &inner].concat(), "an unprivileged id made one, and another in it")
}

fn apparmor() -> io::Result<String> {
    let label = match fs::read_to_string("/proc/self/attr/apparmor/current") {
        Ok(label) => label,
        // No AppArmor in the kernel, or it is switched off.
        Err(e) if matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::InvalidInput) => {
            return Ok("not on this host".to_owned());
        }
        Err(e) => return Err(e),
    };
    match label.trim_end() {
        "unconfined" => Ok("the edge is unconfined".to_owned()),
        profile => Err(io::Error::other(format!("the edge is confined by {profile}"))),
    }
}

/// An overlay in a mount namespace that ends with the command.
fn overlay() -> io::Result<String> {
    let script = "mount -t tmpfs tmpfs /mnt && cd /mnt && mkdir l u w m && \
        mount -t overlay -o lowerdir=l,upperdir=u,workdir=w,volatile,redirect_dir=on overlay m";
    command(&["unshare", "--mount", "sh", "-c", script], "an overlay was mounted")
}

/// The smallest EROFS there is: a superblock and an empty root directory in one block.
fn erofs() -> io::Result<String> {
    let mut image = vec![0u8; 4096];
    let at = |image: &mut Vec<u8>, offset: usize, bytes: &[u8]| {
        image[offset..offset + bytes.len()].copy_from_slice(bytes)
    };
    at(&mut image, 1024, &0xe0f5_e1e2_u32.to_le_bytes()); // magic
    at(&mut image, 1036, &[12]); // 4096-byte blocks
    at(&mut image, 1038, &36u16.to_le_bytes()); // root inode, in 32-byte slots
    at(&mut image, 1040, &1u64.to_le_bytes()); // inodes
    at(&mut image, 1060, &1u32.to_le_bytes()); // blocks
    // Root: compact inode, data inline after it: directory entries `.` and `..`.
    let root = 36 * 32;
    at(&mut image, root, &(2u16 << 1).to_le_bytes());
    at(&mut image, root + 4, &0o040_755u16.to_le_bytes());
    at(&mut image, root + 6, &2u16.to_le_bytes()); // links
    at(&mut image, root + 8, &27u32.to_le_bytes()); // size
    let entries = root + 32;
    for (i, name_at) in [24u16, 25].into_iter().enumerate() {
        let entry = entries + i * 12;
        at(&mut image, entry, &36u64.to_le_bytes());
        at(&mut image, entry + 8, &name_at.to_le_bytes());
        at(&mut image, entry + 10, &[2]);
    }
    at(&mut image, entries + 24, b"...");
    let path = std::env::temp_dir().join(format!("dsec-probe-{}.erofs", std::process::id()));
    fs::write(&path, &image)?;
    let mounted = path
        .to_str()
        .ok_or_else(|| io::Error::other("the temporary directory's path is not UTF-8"))
        .and_then(|source| new_mount("erofs", &[FsSetting::Text("source", source)], Attr::READ_ONLY));
    fs::remove_file(&path)?;
    mounted.map(|_| "a file was mounted without a loop device".to_owned())
}

fn file_system(name: &str) -> io::Result<String> {
    let known = fs::read_to_string("/proc/filesystems")?;
    if known.lines().any(|line| line.trim_start_matches("nodev").trim() == name) {
        return Ok("in the kernel".to_owned());
    }
    command(&["modprobe", name], "module loaded")
}

fn readable(path: &str) -> io::Result<String> {
    fs::OpenOptions::new().read(true).open(path).map(|_| format!("{path} opens"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_that_sandboxes_can_use_against_the_host_are_named() {
        assert!(process_ids("4194304").is_ok());
        assert!(process_ids("32768").unwrap_err().to_string().contains("32 sandboxes"));
        assert!(core_dumps("core", Some(0)).is_ok());
        assert!(core_dumps("|/usr/lib/handler %p", None).is_ok());
        assert!(core_dumps("|/usr/lib/handler %p", Some(0)).is_err());
        assert!(core_dumps("@/run/cores", None).is_err());
        assert!(buffers("212992").is_ok());
        assert!(buffers("4194304").is_err());
    }
}
