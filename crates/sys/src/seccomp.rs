//! The seccomp allow-list of commands in a container, as a program that loads fast.
//!
//! The usual compilers test one system call after the other: 1,600 instructions that take the
//! kernel 640-770 us to check and copy, in every exec. This one is a binary search over ranges of
//! numbers: some 200 instructions, 39 us. What it decides is the same (the tests run the program over
//! every number).
//!
//! What is not on the list answers `EPERM`, or `ENOSYS` where a program has a fall-back that it only
//! tries then (`clone3`, `io_uring_*`, and numbers newer than this list).

use libc::{EAFNOSUPPORT, EINVAL, ENOPROTOOPT, ENOSYS, EPERM, EPROTONOSUPPORT};

#[cfg(not(target_arch = "x86_64"))]
compile_error!("the system-call list is written for x86_64");

const AUDIT_ARCH: u32 = 0xC000_003E;
/// Calls of the x32 ABI have this bit.
const X32_BIT: u32 = 0x4000_0000;
/// First number that this list knows nothing of: a newer kernel's call.
const UNKNOWN_FROM: u32 = 463;

const RET_ALLOW: u32 = 0x7fff_0000;
const RET_ERRNO: u32 = 0x0005_0000;
const RET_KILL: u32 = 0x8000_0000;

/// One classic BPF instruction, `struct sock_filter`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Instruction {
    code: u16,
    jt: u8,
    jf: u8,
    k: u32,
}

const LOAD: u16 = 0x20; // BPF_LD | BPF_W | BPF_ABS
const JUMP: u16 = 0x05; // BPF_JMP | BPF_JA
const JUMP_EQ: u16 = 0x15; // BPF_JMP | BPF_JEQ | BPF_K
const JUMP_GE: u16 = 0x35; // BPF_JMP | BPF_JGE | BPF_K
const JUMP_SET: u16 = 0x45; // BPF_JMP | BPF_JSET | BPF_K
const RETURN: u16 = 0x06; // BPF_RET | BPF_K

const fn op(code: u16, k: u32, jt: u8, jf: u8) -> Instruction {
    Instruction { code, jt, jf, k }
}

const fn errno(number: i32) -> Rule {
    Rule::Errno(number)
}

/// What happens to one system call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Rule {
    Allow,
    Errno(i32),
    /// Allowed unless one of these cases holds; the first that does decides.
    Unless(&'static [Case]),
}

/// All tests hold: this errno. 0 is success without the call being made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Case {
    when: &'static [Test],
    errno: i32,
}

/// A test of one half of an argument, named by its place in `struct seccomp_data`: [`low`] or [`high`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Test {
    /// It is one of these.
    In(u32, &'static [u32]),
    /// It is none of these.
    NotIn(u32, &'static [u32]),
    /// It has one of these bits.
    Bits(u32, u32),
}

/// Low half of an argument, little endian. Enough for arguments that the kernel takes as 32 bits.
const fn low(argument: u32) -> u32 {
    16 + 8 * argument
}

/// High half of an argument.
const fn high(argument: u32) -> u32 {
    low(argument) + 4
}

/// `CLONE_NEW*` of every namespace: nobody inside makes one, a user namespace above all.
const NEW_NAMESPACES: u32 = 0x7e02_0080;
/// UNIX, IPv4, IPv6 and netlink. The others are seldom used and have had many defects.
const FAMILIES: &[u32] = &[1, 2, 10, 16];
/// Linux, Linux without ADDR_NO_RANDOMIZE's cousins that weaken a process, and the query.
const PERSONALITIES: &[u32] = &[0, 0x8, 0x2_0000, 0x2_0008, 0xffff_ffff];
/// Typing into a terminal for its owner, and console tricks.
const TERMINAL_FORGERY: &[u32] = &[0x5412, 0x541c];

const CLONE: &[Case] = &[Case { when: &[Test::Bits(low(0), NEW_NAMESPACES)], errno: EPERM }];
/// Of netlink only the protocol that lists interfaces and addresses, which C libraries have no other way to: what waits
/// in a netlink socket counts in nobody's memory, and the other protocols are for administrators.
const SOCKET: &[Case] = &[
    Case { when: &[Test::NotIn(low(0), FAMILIES)], errno: EAFNOSUPPORT },
    Case {
        when: &[Test::In(low(0), &[AF_NETLINK]), Test::NotIn(low(2), &[NETLINK_ROUTE])],
        errno: EPROTONOSUPPORT,
    },
];
const SOCKETPAIR: &[Case] = &[Case { when: &[Test::NotIn(low(0), &[AF_UNIX])], errno: EAFNOSUPPORT }];
const PERSONALITY: &[Case] = &[Case { when: &[Test::NotIn(low(0), PERSONALITIES)], errno: EPERM }];
const IOCTL: &[Case] = &[Case { when: &[Test::In(low(1), TERMINAL_FORGERY)], errno: EPERM }];
/// No filters of their own, neither for system calls nor for sockets: their machine code comes out of one small pool of
/// the whole host (`net.core.bpf_jit_limit`), and who empties it stops every launch. The answers are those of a kernel
/// built without them, for which programs that sandbox themselves are ready.
const SECCOMP: &[Case] =
    &[Case { when: &[Test::In(low(0), &[libc::SECCOMP_SET_MODE_FILTER])], errno: EINVAL }];
const PRCTL: &[Case] = &[Case { when: &[Test::In(low(0), &[libc::PR_SET_SECCOMP as u32])], errno: EINVAL }];
const SETSOCKOPT: &[Case] = &[Case {
    when: &[
        Test::In(low(1), &[libc::SOL_SOCKET as u32]),
        Test::In(low(2), &[libc::SO_ATTACH_FILTER as u32, libc::SO_ATTACH_REUSEPORT_CBPF as u32]),
    ],
    errno: ENOPROTOOPT,
}];
/// The limit of core files stays at 1, the one value at which the kernel starts no handler on the host for a crash: not
/// even 0 does that. Who sets it is told that it was done.
const SETRLIMIT: &[Case] = &[Case { when: &[Test::In(low(0), &[libc::RLIMIT_CORE])], errno: DONE }];
const PRLIMIT: &[Case] = &[
    Case { when: &[Test::In(low(1), &[libc::RLIMIT_CORE]), Test::NotIn(low(2), &[0])], errno: DONE },
    Case { when: &[Test::In(low(1), &[libc::RLIMIT_CORE]), Test::NotIn(high(2), &[0])], errno: DONE },
];
/// A shared mapping of a file is one of the file system below the overlay: this would sync it for all.
const MSYNC: &[Case] = &[Case { when: &[Test::Bits(low(2), libc::MS_SYNC as u32)], errno: DONE }];

/// Success without the call being made.
const DONE: i32 = 0;
const AF_UNIX: u32 = libc::AF_UNIX as u32;
const AF_NETLINK: u32 = libc::AF_NETLINK as u32;
const NETLINK_ROUTE: u32 = libc::NETLINK_ROUTE as u32;

/// Numbers that `libc` does not name yet.
const FUTEX_WAKE: i64 = 454;
const FUTEX_WAIT: i64 = 455;
const FUTEX_REQUEUE: i64 = 456;
const CACHESTAT: i64 = 451;
const FCHMODAT2: i64 = 452;
const MAP_SHADOW_STACK: i64 = 453;
const FUTEX_WAITV: i64 = 449;
const IO_PGETEVENTS: i64 = 333;

#[rustfmt::skip]
const ALLOWED: &[i64] = &[
    // Files and descriptors.
    libc::SYS_read, libc::SYS_write, libc::SYS_open, libc::SYS_close, libc::SYS_stat, libc::SYS_fstat, libc::SYS_lstat,
    libc::SYS_poll, libc::SYS_lseek, libc::SYS_pread64, libc::SYS_pwrite64, libc::SYS_readv, libc::SYS_writev,
    libc::SYS_access, libc::SYS_pipe, libc::SYS_select, libc::SYS_dup, libc::SYS_dup2, libc::SYS_dup3, libc::SYS_sendfile,
    libc::SYS_fcntl, libc::SYS_flock, libc::SYS_fsync, libc::SYS_fdatasync, libc::SYS_truncate, libc::SYS_ftruncate,
    libc::SYS_getdents, libc::SYS_getdents64, libc::SYS_getcwd, libc::SYS_chdir, libc::SYS_fchdir, libc::SYS_rename,
    libc::SYS_mkdir, libc::SYS_rmdir, libc::SYS_creat, libc::SYS_link, libc::SYS_unlink, libc::SYS_symlink,
    libc::SYS_readlink, libc::SYS_chmod, libc::SYS_fchmod, libc::SYS_chown, libc::SYS_fchown, libc::SYS_lchown,
    libc::SYS_umask, libc::SYS_utime, libc::SYS_utimes, libc::SYS_mknod, libc::SYS_mknodat, libc::SYS_statfs,
    libc::SYS_fstatfs, libc::SYS_syncfs, libc::SYS_chroot, libc::SYS_readahead, libc::SYS_setxattr,
    libc::SYS_lsetxattr, libc::SYS_fsetxattr, libc::SYS_getxattr, libc::SYS_lgetxattr, libc::SYS_fgetxattr,
    libc::SYS_listxattr, libc::SYS_llistxattr, libc::SYS_flistxattr, libc::SYS_removexattr, libc::SYS_lremovexattr,
    libc::SYS_fremovexattr, libc::SYS_fadvise64, libc::SYS_openat, libc::SYS_openat2, libc::SYS_mkdirat,
    libc::SYS_fchownat, libc::SYS_futimesat, libc::SYS_newfstatat, libc::SYS_unlinkat, libc::SYS_renameat,
    libc::SYS_renameat2, libc::SYS_linkat, libc::SYS_symlinkat, libc::SYS_readlinkat, libc::SYS_fchmodat, FCHMODAT2,
    libc::SYS_faccessat, libc::SYS_faccessat2, libc::SYS_pselect6, libc::SYS_ppoll, libc::SYS_splice, libc::SYS_tee,
    libc::SYS_sync_file_range, libc::SYS_vmsplice, libc::SYS_utimensat, libc::SYS_fallocate, libc::SYS_pipe2,
    libc::SYS_preadv, libc::SYS_pwritev, libc::SYS_preadv2, libc::SYS_pwritev2, libc::SYS_copy_file_range,
    libc::SYS_statx, libc::SYS_close_range, libc::SYS_name_to_handle_at, libc::SYS_memfd_create, CACHESTAT,
    libc::SYS_inotify_init, libc::SYS_inotify_init1, libc::SYS_inotify_add_watch, libc::SYS_inotify_rm_watch,
    libc::SYS_epoll_create, libc::SYS_epoll_create1, libc::SYS_epoll_ctl, libc::SYS_epoll_wait, libc::SYS_epoll_pwait,
    libc::SYS_epoll_pwait2, libc::SYS_epoll_ctl_old, libc::SYS_epoll_wait_old, libc::SYS_eventfd, libc::SYS_eventfd2,
    libc::SYS_signalfd, libc::SYS_signalfd4, libc::SYS_timerfd_create, libc::SYS_timerfd_settime,
    libc::SYS_timerfd_gettime, libc::SYS_io_destroy, libc::SYS_io_getevents,
    IO_PGETEVENTS, libc::SYS_io_submit, libc::SYS_io_cancel,
    // Memory.
    libc::SYS_mmap, libc::SYS_mprotect, libc::SYS_munmap, libc::SYS_brk, libc::SYS_mremap,
    libc::SYS_mincore, libc::SYS_madvise, libc::SYS_mlock, libc::SYS_mlock2, libc::SYS_munlock, libc::SYS_mlockall,
    libc::SYS_munlockall, libc::SYS_remap_file_pages, libc::SYS_pkey_mprotect, libc::SYS_pkey_alloc,
    libc::SYS_pkey_free, libc::SYS_membarrier, libc::SYS_memfd_secret, libc::SYS_process_mrelease,
    libc::SYS_get_mempolicy, libc::SYS_set_mempolicy, libc::SYS_mbind, MAP_SHADOW_STACK,
    // Processes, threads, signals, ids.
    libc::SYS_rt_sigaction, libc::SYS_rt_sigprocmask, libc::SYS_rt_sigreturn, libc::SYS_rt_sigpending,
    libc::SYS_rt_sigtimedwait, libc::SYS_rt_sigqueueinfo, libc::SYS_rt_sigsuspend, libc::SYS_rt_tgsigqueueinfo,
    libc::SYS_sigaltstack, libc::SYS_pause, libc::SYS_fork, libc::SYS_vfork, libc::SYS_execve, libc::SYS_execveat,
    libc::SYS_exit, libc::SYS_exit_group, libc::SYS_wait4, libc::SYS_waitid, libc::SYS_kill, libc::SYS_tkill,
    libc::SYS_tgkill, libc::SYS_getpid, libc::SYS_getppid, libc::SYS_gettid, libc::SYS_getuid, libc::SYS_getgid,
    libc::SYS_geteuid, libc::SYS_getegid, libc::SYS_setuid, libc::SYS_setgid, libc::SYS_setpgid, libc::SYS_getpgid,
    libc::SYS_getpgrp, libc::SYS_setsid, libc::SYS_getsid, libc::SYS_setreuid, libc::SYS_setregid,
    libc::SYS_getgroups, libc::SYS_setgroups, libc::SYS_setresuid, libc::SYS_getresuid, libc::SYS_setresgid,
    libc::SYS_getresgid, libc::SYS_setfsuid, libc::SYS_setfsgid, libc::SYS_capget, libc::SYS_capset,
    libc::SYS_arch_prctl, libc::SYS_getpriority, libc::SYS_setpriority, libc::SYS_sched_setparam,
    libc::SYS_sched_getparam, libc::SYS_sched_setscheduler, libc::SYS_sched_getscheduler,
    libc::SYS_sched_get_priority_max, libc::SYS_sched_get_priority_min, libc::SYS_sched_rr_get_interval,
    libc::SYS_sched_yield, libc::SYS_sched_setaffinity, libc::SYS_sched_getaffinity, libc::SYS_sched_setattr,
    libc::SYS_sched_getattr, libc::SYS_ioprio_set, libc::SYS_ioprio_get, libc::SYS_getrlimit,
    libc::SYS_getrusage, libc::SYS_times, libc::SYS_futex, FUTEX_WAITV, FUTEX_WAKE, FUTEX_WAIT,
    FUTEX_REQUEUE, libc::SYS_set_robust_list, libc::SYS_get_robust_list, libc::SYS_set_tid_address,
    libc::SYS_set_thread_area, libc::SYS_get_thread_area, libc::SYS_restart_syscall, libc::SYS_rseq,
    libc::SYS_ptrace, libc::SYS_process_vm_readv, libc::SYS_process_vm_writev, libc::SYS_kcmp, libc::SYS_getcpu,
    libc::SYS_pidfd_open, libc::SYS_pidfd_send_signal, libc::SYS_pidfd_getfd,
    libc::SYS_landlock_create_ruleset, libc::SYS_landlock_add_rule, libc::SYS_landlock_restrict_self,
    // Time.
    libc::SYS_nanosleep, libc::SYS_getitimer, libc::SYS_setitimer, libc::SYS_alarm, libc::SYS_gettimeofday,
    libc::SYS_time, libc::SYS_clock_gettime, libc::SYS_clock_getres, libc::SYS_clock_nanosleep,
    libc::SYS_timer_create, libc::SYS_timer_settime, libc::SYS_timer_gettime, libc::SYS_timer_getoverrun,
    libc::SYS_timer_delete, libc::SYS_adjtimex, libc::SYS_clock_adjtime,
    // Sockets and System V and POSIX IPC.
    libc::SYS_connect, libc::SYS_accept, libc::SYS_accept4, libc::SYS_sendto, libc::SYS_recvfrom, libc::SYS_sendmsg,
    libc::SYS_recvmsg, libc::SYS_sendmmsg, libc::SYS_recvmmsg, libc::SYS_shutdown, libc::SYS_bind, libc::SYS_listen,
    libc::SYS_getsockname, libc::SYS_getpeername, libc::SYS_getsockopt,
    libc::SYS_shmget, libc::SYS_shmat, libc::SYS_shmctl, libc::SYS_shmdt, libc::SYS_semget, libc::SYS_semop,
    libc::SYS_semctl, libc::SYS_semtimedop, libc::SYS_msgget, libc::SYS_msgsnd, libc::SYS_msgrcv, libc::SYS_msgctl,
    libc::SYS_mq_open, libc::SYS_mq_unlink, libc::SYS_mq_timedsend, libc::SYS_mq_timedreceive, libc::SYS_mq_notify,
    libc::SYS_mq_getsetattr,
    // The machine, read only.
    libc::SYS_uname, libc::SYS_sysinfo, libc::SYS_getrandom,
];

fn rule(number: u32) -> Rule {
    let nr = i64::from(number);
    match nr {
        libc::SYS_clone => Rule::Unless(CLONE),
        libc::SYS_socket => Rule::Unless(SOCKET),
        libc::SYS_socketpair => Rule::Unless(SOCKETPAIR),
        libc::SYS_setsockopt => Rule::Unless(SETSOCKOPT),
        libc::SYS_personality => Rule::Unless(PERSONALITY),
        libc::SYS_ioctl => Rule::Unless(IOCTL),
        libc::SYS_seccomp => Rule::Unless(SECCOMP),
        libc::SYS_prctl => Rule::Unless(PRCTL),
        libc::SYS_setrlimit => Rule::Unless(SETRLIMIT),
        libc::SYS_prlimit64 => Rule::Unless(PRLIMIT),
        libc::SYS_msync => Rule::Unless(MSYNC),
        // It writes out every file system of the host. Nothing of a sandbox is ever synced: its layer is `volatile`.
        libc::SYS_sync => errno(DONE),
        // Its contexts are counted for the whole host; programs fall back to plain reads and writes.
        libc::SYS_io_setup => errno(ENOSYS),
        // Its flags are behind a pointer, which a filter cannot follow; C libraries fall back to clone.
        libc::SYS_clone3 => errno(ENOSYS),
        libc::SYS_io_uring_setup | libc::SYS_io_uring_enter | libc::SYS_io_uring_register => errno(ENOSYS),
        _ if number >= UNKNOWN_FROM => errno(ENOSYS),
        _ if ALLOWED.contains(&nr) => Rule::Allow,
        _ => errno(EPERM),
    }
}

const NUMBER_AT: u32 = 0;
const ARCH_AT: u32 = 4;

fn ret_errno(number: i32) -> Instruction {
    op(RETURN, RET_ERRNO | (number as u32 & 0xffff), 0, 0)
}

const ALLOW: Instruction = op(RETURN, RET_ALLOW, 0, 0);

fn leaf(rule: Rule) -> Vec<Instruction> {
    match rule {
        Rule::Allow => vec![ALLOW],
        Rule::Errno(number) => vec![ret_errno(number)],
        Rule::Unless(cases) => cases.iter().flat_map(case).chain([ALLOW]).collect(),
    }
}

/// One case: goes on behind itself when a test fails.
fn case(case: &Case) -> Vec<Instruction> {
    // Written from the end, so that each jump's length is known.
    let mut code = vec![ret_errno(case.errno)];
    for test in case.when.iter().rev() {
        let fail = code.len() as u8;
        let (at, mut tests) = match *test {
            Test::Bits(at, bits) => (at, vec![op(JUMP_SET, bits, 0, fail)]),
            Test::In(at, values) => {
                let last = values.len() - 1;
                let jump = |(i, v): (usize, &u32)| {
                    op(JUMP_EQ, *v, (last - i) as u8, if i == last { fail } else { 0 })
                };
                (at, values.iter().enumerate().map(jump).collect())
            }
            Test::NotIn(at, values) => {
                let last = values.len() - 1;
                let jump = |(i, v): (usize, &u32)| op(JUMP_EQ, *v, (last - i) as u8 + fail, 0);
                (at, values.iter().enumerate().map(jump).collect())
            }
        };
        tests.insert(0, op(LOAD, at, 0, 0));
        code.splice(0..0, tests);
    }
    code
}

/// Ranges of numbers under one rule, by their first number.
fn ranges() -> Vec<(u32, Rule)> {
    let mut ranges: Vec<(u32, Rule)> = Vec::new();
    for number in 0..=UNKNOWN_FROM {
        let rule = rule(number);
        if ranges.last().is_none_or(|(_, last)| *last != rule) {
            ranges.push((number, rule));
        }
    }
    ranges
}

fn search(ranges: &[(u32, Rule)]) -> Vec<Instruction> {
    let (left, right) = match ranges {
        [] => return Vec::new(),
        [(_, rule)] => return leaf(*rule),
        _ => ranges.split_at(ranges.len() / 2),
    };
    let (low, high) = (search(left), search(right));
    let mut code = Vec::with_capacity(low.len() + high.len() + 2);
    match u8::try_from(low.len()) {
        Ok(over) => code.push(op(JUMP_GE, right[0].0, over, 0)),
        // A conditional jump reaches 255 instructions; an unconditional one reaches all.
        Err(_) => code.extend([op(JUMP_GE, right[0].0, 0, 1), op(JUMP, low.len() as u32, 0, 0)]),
    }
    code.extend(low);
    code.extend(high);
    code
}

/// The program.
pub fn program() -> Vec<Instruction> {
    let mut code = vec![
        op(LOAD, ARCH_AT, 0, 0),
        op(JUMP_EQ, AUDIT_ARCH, 1, 0),
        op(RETURN, RET_KILL, 0, 0),
        op(LOAD, NUMBER_AT, 0, 0),
        op(JUMP_GE, X32_BIT, 0, 1),
        ret_errno(ENOSYS),
    ];
    code.extend(search(&ranges()));
    code
}

/// The program as the kernel takes it: `struct sock_filter`s in host byte order.
pub fn program_bytes() -> Vec<u8> {
    program()
        .iter()
        .flat_map(|i| {
            let mut bytes = [0u8; 8];
            bytes[..2].copy_from_slice(&i.code.to_ne_bytes());
            bytes[2] = i.jt;
            bytes[3] = i.jf;
            bytes[4..].copy_from_slice(&i.k.to_ne_bytes());
            bytes
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs the program as the kernel would.
    fn run(arch: u32, number: u32, arguments: &[u64]) -> u32 {
        let program = program();
        let (mut at, mut a) = (0, 0);
        loop {
            let i = program[at];
            at += 1;
            let mut branch = |taken: bool| at += usize::from(if taken { i.jt } else { i.jf });
            match i.code {
                LOAD => {
                    a = match i.k {
                        NUMBER_AT => number,
                        ARCH_AT => arch,
                        k => {
                            let (argument, half) = ((k as usize - 16) / 8, (k as usize - 16) % 8 / 4);
                            (arguments.get(argument).copied().unwrap_or(0) >> (32 * half)) as u32
                        }
                    }
                }
                JUMP => at += i.k as usize,
                JUMP_EQ => branch(a == i.k),
                JUMP_GE => branch(a >= i.k),
                JUMP_SET => branch(a & i.k != 0),
                RETURN => return i.k,
                code => panic!("instruction {code:#x}"),
            }
        }
    }

    fn decide<const N: usize>(number: i64, arguments: [u64; N]) -> u32 {
        run(AUDIT_ARCH, number as u32, &arguments)
    }

    const fn refused(errno: i32) -> u32 {
        RET_ERRNO | errno as u32
    }

    #[test]
    fn the_search_decides_as_the_list_does_for_every_number() {
        for number in (0..2000).chain([X32_BIT - 1]) {
            let expected = match rule(number) {
                Rule::Allow => RET_ALLOW,
                Rule::Errno(errno) => refused(errno),
                // Arguments are tested below; these are allowed ones.
                _ => continue,
            };
            assert_eq!(run(AUDIT_ARCH, number, &[]), expected, "system call {number}");
        }
    }

    #[test]
    fn what_breaks_out_is_refused() {
        for number in [
            libc::SYS_mount,
            libc::SYS_umount2,
            libc::SYS_unshare,
            libc::SYS_setns,
            libc::SYS_bpf,
            libc::SYS_perf_event_open,
            libc::SYS_userfaultfd,
            libc::SYS_keyctl,
            libc::SYS_add_key,
            libc::SYS_open_by_handle_at,
            libc::SYS_kexec_load,
            libc::SYS_init_module,
            libc::SYS_reboot,
            libc::SYS_swapon,
            libc::SYS_quotactl,
            libc::SYS_pivot_root,
            libc::SYS_move_mount,
            libc::SYS_fsopen,
            libc::SYS_iopl,
            libc::SYS_acct,
            libc::SYS_settimeofday,
            libc::SYS_syslog,
            libc::SYS_sethostname,
        ] {
            assert_eq!(decide(number, [0, 0]), refused(EPERM), "system call {number}");
        }
        assert_eq!(decide(libc::SYS_clone3, [0, 0]), refused(ENOSYS));
        assert_eq!(decide(libc::SYS_io_uring_setup, [0, 0]), refused(ENOSYS));
        assert_eq!(decide(libc::SYS_io_setup, [0, 0]), refused(ENOSYS));
    }

    #[test]
    fn arguments_decide_where_they_must() {
        let thread = 0x003d_0f00;
        assert_eq!(decide(libc::SYS_clone, [thread, 0]), RET_ALLOW);
        for namespace in [libc::CLONE_NEWUSER, libc::CLONE_NEWNS, libc::CLONE_NEWNET, libc::CLONE_NEWCGROUP] {
            assert_eq!(decide(libc::SYS_clone, [thread | namespace as u64, 0]), refused(EPERM));
        }
        for family in [libc::AF_UNIX, libc::AF_INET, libc::AF_INET6, libc::AF_NETLINK] {
            assert_eq!(decide(libc::SYS_socket, [family as u64, 0]), RET_ALLOW, "family {family}");
        }
        for family in [libc::AF_VSOCK, libc::AF_PACKET, libc::AF_ALG, libc::AF_TIPC] {
            assert_eq!(
                decide(libc::SYS_socket, [family as u64, 0]),
                refused(EAFNOSUPPORT),
                "family {family}"
            );
        }
        assert_eq!(decide(libc::SYS_socketpair, [libc::AF_UNIX as u64, 0]), RET_ALLOW);
        assert_eq!(decide(libc::SYS_socketpair, [libc::AF_VSOCK as u64, 0]), refused(EAFNOSUPPORT));
        assert_eq!(decide(libc::SYS_ioctl, [0, 0x5401]), RET_ALLOW);
        assert_eq!(decide(libc::SYS_ioctl, [0, 0x5412]), refused(EPERM));
        assert_eq!(decide(libc::SYS_ioctl, [0, 0x541c]), refused(EPERM));
        assert_eq!(decide(libc::SYS_personality, [0xffff_ffff, 0]), RET_ALLOW);
        assert_eq!(decide(libc::SYS_personality, [0x0040_0000, 0]), refused(EPERM));
    }

    #[test]
    fn what_draws_on_the_whole_host_is_refused_as_a_kernel_without_it_would() {
        let netlink = |protocol| decide(libc::SYS_socket, [16, 3, protocol]);
        assert_eq!(netlink(libc::NETLINK_ROUTE as u64), RET_ALLOW);
        for protocol in [libc::NETLINK_USERSOCK, libc::NETLINK_AUDIT, libc::NETLINK_KOBJECT_UEVENT] {
            assert_eq!(netlink(protocol as u64), refused(EPROTONOSUPPORT));
        }
        assert_eq!(decide(libc::SYS_socket, [2, 2, 17]), RET_ALLOW);
        assert_eq!(decide(libc::SYS_seccomp, [1, 0, 0x7000]), refused(EINVAL));
        assert_eq!(decide(libc::SYS_seccomp, [2, 0, 0x7000]), RET_ALLOW);
        assert_eq!(decide(libc::SYS_prctl, [22, 2, 0x7000]), refused(EINVAL));
        assert_eq!(decide(libc::SYS_prctl, [38, 1]), RET_ALLOW);
        for filter in [libc::SO_ATTACH_FILTER, libc::SO_ATTACH_REUSEPORT_CBPF] {
            assert_eq!(decide(libc::SYS_setsockopt, [3, 1, filter as u64]), refused(ENOPROTOOPT));
        }
        assert_eq!(decide(libc::SYS_setsockopt, [3, 1, libc::SO_RCVBUF as u64]), RET_ALLOW);
        // The same number on another level.
        assert_eq!(decide(libc::SYS_setsockopt, [3, 6, libc::SO_ATTACH_FILTER as u64]), RET_ALLOW);
    }

    #[test]
    fn a_sync_and_a_new_core_limit_are_answered_and_not_done() {
        let done = refused(0);
        assert_eq!(decide(libc::SYS_sync, []), done);
        assert_eq!(decide(libc::SYS_msync, [0x7000, 1, libc::MS_SYNC as u64]), done);
        assert_eq!(decide(libc::SYS_msync, [0x7000, 1, libc::MS_ASYNC as u64]), RET_ALLOW);
        let (core, files) = (u64::from(libc::RLIMIT_CORE), u64::from(libc::RLIMIT_NOFILE));
        assert_eq!(decide(libc::SYS_setrlimit, [core, 0x7000]), done);
        assert_eq!(decide(libc::SYS_setrlimit, [files, 0x7000]), RET_ALLOW);
        for new in [0x7000, 0x1_0000_0000, u64::MAX] {
            assert_eq!(decide(libc::SYS_prlimit64, [0, core, new, 0]), done, "from {new:#x}");
            assert_eq!(decide(libc::SYS_prlimit64, [0, files, new, 0]), RET_ALLOW);
        }
        assert_eq!(decide(libc::SYS_prlimit64, [0, core, 0, 0x7000]), RET_ALLOW);
    }

    #[test]
    fn other_abis_do_not_pass_under_another_number() {
        assert_eq!(run(0x4000_0003, 0, &[]), RET_KILL);
        assert_eq!(run(AUDIT_ARCH, X32_BIT, &[]), refused(ENOSYS));
        assert_eq!(run(AUDIT_ARCH, X32_BIT | 520, &[]), refused(ENOSYS));
    }

    #[test]
    fn it_stays_small() {
        assert!(program().len() < 320, "{} instructions", program().len());
        assert_eq!(program_bytes().len(), program().len() * 8);
    }
}
