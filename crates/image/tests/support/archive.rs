//! Archives made by hand, for what no tar program writes.

/// A tar archive in the making.
#[derive(Default)]
pub(crate) struct Archive(Vec<u8>);

impl Archive {
    pub(crate) fn new() -> Self {
        Self::default()
    }

    /// Any entry. `change` may alter the header before its checksum is made.
    pub(crate) fn raw(
        mut self,
        name: &[u8],
        type_flag: u8,
        link: &[u8],
        content: &[u8],
        change: impl FnOnce(&mut [u8; 512]),
    ) -> Self {
        let mut header = [0u8; 512];
        let mut put = |at: usize, bytes: &[u8]| header[at..at + bytes.len()].copy_from_slice(bytes);
        put(0, &name[..name.len().min(100)]);
        put(100, b"0000644\0");
        put(108, b"0000000\0");
        put(116, b"0000000\0");
        put(124, format!("{:011o}\0", content.len()).as_bytes());
        put(136, b"00000000001\0");
        put(156, &[type_flag]);
        put(157, &link[..link.len().min(100)]);
        put(257, b"ustar\x0000");
        change(&mut header);
        header[148..156].copy_from_slice(b"        ");
        let sum: u32 = header.iter().map(|byte| u32::from(*byte)).sum();
        header[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
        self.0.extend_from_slice(&header);
        self.bytes(content)
    }

    /// Bytes padded to a block.
    pub(crate) fn bytes(mut self, bytes: &[u8]) -> Self {
        self.0.extend_from_slice(bytes);
        self.0.resize(self.0.len().next_multiple_of(512), 0);
        self
    }

    /// PAX records for the entry after them.
    pub(crate) fn pax(self, records: &[(&str, &[u8])]) -> Self {
        self.extended(b'x', records)
    }

    pub(crate) fn extended(self, type_flag: u8, records: &[(&str, &[u8])]) -> Self {
        let mut payload = Vec::new();
        for (key, value) in records {
            let rest = key.len() + value.len() + 3;
            let digits = (1..).find(|digits| (rest + digits).to_string().len() == *digits).unwrap();
            payload.extend_from_slice(format!("{} {key}=", rest + digits).as_bytes());
            payload.extend_from_slice(value);
            payload.push(b'\n');
        }
        self.raw(b"pax", type_flag, b"", &payload, |_| {})
    }

    pub(crate) fn file(self, name: &str, content: &[u8]) -> Self {
        self.raw(name.as_bytes(), b'0', b"", content, |_| {})
    }

    pub(crate) fn dir(self, name: &str) -> Self {
        self.raw(name.as_bytes(), b'5', b"", b"", |_| {})
    }

    pub(crate) fn symlink(self, name: &str, target: &str) -> Self {
        self.raw(name.as_bytes(), b'2', target.as_bytes(), b"", |_| {})
    }

    pub(crate) fn hard_link(self, name: &str, target: &str) -> Self {
        self.raw(name.as_bytes(), b'1', target.as_bytes(), b"", |_| {})
    }

    /// The archive with its end mark.
    pub(crate) fn finish(mut self) -> Vec<u8> {
        self.0.resize(self.0.len() + 1024, 0);
        self.0
    }

    /// The archive without one.
    pub(crate) fn cut(self) -> Vec<u8> {
        self.0
    }
}
