//! The shell's own messages, as its users are to read them.
//!
//! Bash and busybox begin each message with the path of the script that they read and a line's number in it:
//! ours, which mean nothing to whoever sent a line. `/proc/self/fd/8: line 7: foo: command not found` becomes
//! `shell: foo: command not found`.

/// What such a message begins with, before its digits.
const BEFORE: &[u8] = b"/proc/self/fd/8: line ";
/// What follows the digits.
const AFTER: &[u8] = b": ";
/// What it begins with afterwards.
const NAME: &[u8] = b"shell: ";
/// Digits of a line's number at most: more are no line's number.
const DIGITS_MAX: usize = 10;

/// Standard error on its way from a shell to its line.
#[derive(Debug, Default)]
pub(super) struct Messages {
    /// The start of a line that may yet turn out to be a message's.
    held: Vec<u8>,
    /// What came last did not end a line.
    in_line: bool,
}

enum Start {
    /// A message's: this many bytes are to be replaced.
    Message(usize),
    /// Too short to say.
    Unknown,
    Other,
}

fn start(text: &[u8]) -> Start {
    let shared = text.iter().zip(BEFORE).take_while(|(a, b)| a == b).count();
    if shared < BEFORE.len() {
        return if shared == text.len() { Start::Unknown } else { Start::Other };
    }
    let rest = &text[BEFORE.len()..];
    let digits = rest.iter().take_while(|byte| byte.is_ascii_digit()).count();
    let rest = &rest[digits..];
    match digits {
        0 if !rest.is_empty() => Start::Other,
        digits if digits > DIGITS_MAX => Start::Other,
        _ if rest.starts_with(AFTER) && digits > 0 => Start::Message(BEFORE.len() + digits + AFTER.len()),
        _ if AFTER.starts_with(rest) => Start::Unknown,
        _ => Start::Other,
    }
}

impl Messages {
    /// Takes what the shell wrote, and gives what is known of it.
    pub(super) fn pass(&mut self, bytes: &[u8]) -> Vec<u8> {
        let mut given = Vec::with_capacity(self.held.len() + bytes.len());
        self.held.extend_from_slice(bytes);
        let mut rest = &self.held[..];
        while !rest.is_empty() {
            if !self.in_line {
                match start(rest) {
                    Start::Message(length) => {
                        given.extend_from_slice(NAME);
                        rest = &rest[length..];
                        self.in_line = true;
                        continue;
                    }
                    Start::Unknown => break,
                    Start::Other => {}
                }
            }
            let end = rest.iter().position(|byte| *byte == b'\n');
            let (line, after) = rest.split_at(end.map_or(rest.len(), |end| end + 1));
            given.extend_from_slice(line);
            self.in_line = end.is_none();
            rest = after;
        }
        self.held = rest.to_vec();
        given
    }

    /// Nothing more comes for this line: what was held.
    pub(super) fn end(&mut self) -> Vec<u8> {
        self.in_line = false;
        std::mem::take(&mut self.held)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(text: &[u8], piece: usize) -> String {
        let mut messages = Messages::default();
        let mut given: Vec<u8> = text.chunks(piece).flat_map(|piece| messages.pass(piece)).collect();
        given.extend(messages.end());
        String::from_utf8(given).unwrap()
    }

    #[test]
    fn the_path_of_our_script_is_in_no_message_however_it_is_cut() {
        let text = b"a\n/proc/self/fd/8: line 12: foo: command not found\n\
            /proc/self/fd/8: line 3:   7 Killed   sleep 9\nb /proc/self/fd/8: line 1: x\n\
            /proc/self/fd/8: line x\n/proc/self/fd/8: line 99999999999: y\n/proc/self/fd/8: li";
        let wanted = "a\nshell: foo: command not found\nshell:   7 Killed   sleep 9\n\
            b /proc/self/fd/8: line 1: x\n/proc/self/fd/8: line x\n/proc/self/fd/8: line 99999999999: y\n\
            /proc/self/fd/8: li";
        for piece in 1..=text.len() {
            assert_eq!(told(text, piece), wanted, "in pieces of {piece}");
        }
    }

    #[test]
    fn other_output_is_not_held() {
        let mut messages = Messages::default();
        assert_eq!(messages.pass(b"no line end"), b"no line end");
        assert_eq!(messages.pass(b" yet\n/"), b" yet\n");
        assert_eq!(messages.end(), b"/");
    }
}
