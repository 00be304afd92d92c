//! What the kernel is told of another process's memory: process_madvise(2), Linux 5.10.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

/// What is to become of some memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Advice {
    /// It goes to swap, or to the file that it is of, now.
    PageOut,
    /// It is brought back, in the background.
    WillNeed,
}

/// A part of a process's memory; both numbers are multiples of a page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Range {
    /// Its first address.
    pub start: u64,
    /// Its length, bytes.
    pub bytes: u64,
}

/// Tells it of one range. The process may go on meanwhile.
///
/// # Errors
/// `EINVAL`: memory that takes no such advice (locked, or of a device). `ENOMEM`: part of it is not mapped. `ESRCH`: the process is gone.
pub fn advise(process: BorrowedFd<'_>, range: Range, advice: Advice) -> io::Result<()> {
    let advice = match advice {
        Advice::PageOut => libc::MADV_PAGEOUT,
        Advice::WillNeed => libc::MADV_WILLNEED,
    };
    let vector = libc::iovec { iov_base: range.start as *mut libc::c_void, iov_len: range.bytes as usize };
    // SAFETY: the vector lives through the call; its address is the other process's, and neither advice changes what memory holds.
    let done = unsafe {
        libc::syscall(libc::SYS_process_madvise, process.as_raw_fd(), &raw const vector, 1usize, advice, 0u32)
    };
    if done < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
