//! An exec's output as an agent keeps it: a head in memory, then a file.

use std::fs::File;
use std::io::Write;
use std::path::PathBuf;

use dsec_proto::guest::{HEAD_MAX, Stream};

#[derive(Default)]
pub struct Kept {
    pub total: u64,
    pub kept: u64,
    head: Vec<u8>,
    file: Option<File>,
    path: PathBuf,
    limit: u64,
}

impl Kept {
    pub fn new(path: PathBuf, limit: u64) -> Self {
        Self { path, limit, ..Self::default() }
    }

    /// Takes bytes in and tells what is new.
    pub fn take(&mut self, bytes: &[u8]) -> Stream {
        let room = usize::try_from(self.limit - self.kept).unwrap().min(bytes.len());
        let (from, kept) = (self.kept, &bytes[..room]);
        self.total += bytes.len() as u64;
        self.kept += room as u64;
        if self.file.is_none() && self.head.len() + room > HEAD_MAX {
            let mut file = File::create(&self.path).unwrap();
            file.write_all(&self.head).unwrap();
            self.file = Some(file);
        }
        let mut head = Vec::new();
        match &mut self.file {
            Some(file) => file.write_all(kept).unwrap(),
            None => {
                self.head.extend_from_slice(kept);
                head = kept.to_vec();
            }
        }
        Stream { head, head_offset: from, ..self.numbers() }
    }

    fn numbers(&self) -> Stream {
        Stream {
            total: self.total,
            kept: self.kept,
            start: 0,
            spooled: self.file.is_some(),
            head: Vec::new(),
            head_offset: 0,
        }
    }

    /// All of it, for a hello.
    pub fn whole(&self) -> Stream {
        let head = if self.file.is_some() { Vec::new() } else { self.head.clone() };
        Stream { head, ..self.numbers() }
    }
}
