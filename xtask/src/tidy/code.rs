//! Rules on source files.

use super::lexer::{code_of, has_word};
use super::{File, Report, Rule};

/// Longest source file, and the length from which one is listed.
const LINES_MAX: usize = 1000;
const LINES_NOTED: usize = 500;

const UNFINISHED: Rule =
    Rule { name: "unfinished", reason: "what lands is finished; what is missing goes into the documents" };
const GRAB_BAG: Rule =
    Rule { name: "grab-bag", reason: "a module named so says nothing of what is in it and takes everything" };
const TOO_LONG: Rule = Rule {
    name: "too-long",
    reason: "a file is read whole; past 1,000 lines nobody does, so it must be split",
};
const UNSAFE: Rule = Rule {
    name: "unsafe",
    reason: "memory safety is reviewed in two crates, sys and aether, and relied on elsewhere",
};
const PURE_MODEL: Rule = Rule {
    name: "pure-model",
    reason: "rules that know no clock, file, socket or runtime can be tested by calling them",
};
const WIRE_SHAPES: Rule = Rule {
    name: "wire-shapes",
    reason: "what crosses a process boundary is append-only and reviewed in one crate, proto",
};
const BLANKS: Rule = Rule {
    name: "trailing-blanks",
    reason: "blanks at the end of a line make differences that mean nothing",
};

/// Crates that may use `unsafe`.
const UNSAFE_CRATES: [&str; 2] = ["sys", "aether"];
/// What the model may not know.
const IMPURE: [&str; 9] = [
    "tokio",
    "std::fs",
    "std::net",
    "std::process",
    "std::thread",
    "std::env",
    "SystemTime",
    "Instant",
    "getrandom",
];
/// Kinds of text that people write.
const WRITTEN: [&str; 17] = [
    "rs", "toml", "md", "py", "sh", "yml", "yaml", "json", "proto", "ts", "tsx", "js", "css", "html", "c",
    "h", "service",
];

/// Checks every rule of this module.
pub(crate) fn check(files: &[File], report: &mut Report) {
    for file in files {
        if file.has_extension(&WRITTEN) {
            blanks(file, report);
        }
        if file.has_extension(&["rs", "py", "ts", "tsx", "sh"]) {
            length(file, report);
            words(file, report);
        }
        if file.has_extension(&["rs"]) {
            let code = code_of(&file.text);
            grab_bag(file, &code, report);
            rust(file, &code, report);
        }
    }
}

fn blanks(file: &File, report: &mut Report) {
    for (number, line) in file.lines() {
        if line.ends_with([' ', '\t', '\r']) {
            report.add(BLANKS, &file.path, number, "the line ends in blanks");
        }
    }
}

fn length(file: &File, report: &mut Report) {
    // What a program writes nobody reads; its first line says by which.
    if file
        .text
        .lines()
        .next()
        .is_some_and(|line| line.contains("Written by") && line.contains("Do not edit"))
    {
        return;
    }
    let lines = file.text.lines().count();
    if lines > LINES_MAX {
        report.add(TOO_LONG, &file.path, 1, format!("{lines} lines"));
    } else if lines > LINES_NOTED {
        report.note(format!("{} has {lines} lines; aim at {LINES_NOTED}", file.path));
    }
}

/// Words that mark unfinished work. Put together here so that this file does not have them.
fn words(file: &File, report: &mut Report) {
    let macros = [concat!("to", "do!"), concat!("unimpl", "emented!"), concat!("d", "bg!")];
    let marks = [concat!("FIX", "ME"), concat!("X", "XX")];
    let code = if file.has_extension(&["rs"]) { code_of(&file.text) } else { String::new() };
    for (number, line) in code.split('\n').enumerate() {
        for word in macros.into_iter().filter(|word| calls(line, word)) {
            report.add(UNFINISHED, &file.path, number + 1, format!("`{word}`"));
        }
    }
    for (number, line) in file.lines() {
        for word in marks.into_iter().filter(|word| has_word(line, word)) {
            report.add(UNFINISHED, &file.path, number, format!("`{word}`"));
        }
    }
}

fn calls(line: &str, name: &str) -> bool {
    line.match_indices(name)
        .any(|(at, _)| !line[..at].chars().next_back().is_some_and(|c| c.is_alphanumeric() || c == '_'))
}

fn grab_bag(file: &File, code: &str, report: &mut Report) {
    const NAMES: [&str; 4] = ["utils", "util", "common", "helpers"];
    let is_one = |part: &str| NAMES.contains(&part.trim_end_matches(".rs"));
    if file.path.split('/').any(is_one) {
        report.add(GRAB_BAG, &file.path, 1, "the file's path has such a name");
    }
    for (number, line) in code.split('\n').enumerate() {
        if let Some(name) = line.trim().trim_start_matches("pub ").strip_prefix("mod ")
            && is_one(name.trim_end_matches([' ', ';', '{']))
        {
            report.add(GRAB_BAG, &file.path, number + 1, format!("`{}`", line.trim()));
        }
    }
}

fn rust(file: &File, code: &str, report: &mut Report) {
    let Some(krate) = file.krate() else { return };
    for (number, line) in code.split('\n').enumerate() {
        if !UNSAFE_CRATES.contains(&krate) && has_word(line, "unsafe") {
            report.add(UNSAFE, &file.path, number + 1, format!("`unsafe` in {krate}"));
        }
        if krate == "model" {
            for word in IMPURE.into_iter().filter(|word| has_word(line, word)) {
                report.add(PURE_MODEL, &file.path, number + 1, format!("`{word}`"));
            }
        }
    }
    if krate != "proto" {
        derives(file, code, report);
    }
}

/// Derives of wire shapes; a derive may go over several lines.
fn derives(file: &File, code: &str, report: &mut Report) {
    for (at, _) in code.match_indices("derive(") {
        let list = code[at..].split(')').next().unwrap_or_default();
        let number = code[..at].matches('\n').count() + 1;
        for shape in ["ToSchema", "Message", "Oneof"].into_iter().filter(|shape| has_word(list, shape)) {
            report.add(WIRE_SHAPES, &file.path, number, format!("derives `{shape}` outside proto"));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::found;
    use super::check;

    #[test]
    fn each_rule_finds_its_own_and_nothing_else() {
        let todo = concat!("fn f() { to", "do!() } // to", "do!");
        let mark = concat!("// FIX", "ME later");
        let long = "\n".repeat(1001);
        for (path, text, finds) in [
            ("crates/edge/src/a.rs", todo, "crates/edge/src/a.rs:1 unfinished"),
            ("sdk/a.py", mark, "sdk/a.py:1 unfinished"),
            ("crates/edge/src/utils.rs", "", "crates/edge/src/utils.rs:1 grab-bag"),
            ("crates/edge/tests/common/mod.rs", "", "crates/edge/tests/common/mod.rs:1 grab-bag"),
            ("crates/edge/src/lib.rs", "\npub mod util;", "crates/edge/src/lib.rs:2 grab-bag"),
            ("crates/edge/src/b.rs", &long, "crates/edge/src/b.rs:1 too-long"),
            ("crates/edge/src/c.rs", "fn f() { unsafe {} }", "crates/edge/src/c.rs:1 unsafe"),
            ("crates/model/src/d.rs", "use std::fs;", "crates/model/src/d.rs:1 pure-model"),
            ("crates/edge/src/e.rs", "\n#[derive(Debug,\n ToSchema)]", "crates/edge/src/e.rs:2 wire-shapes"),
            ("crates/edge/src/f.rs", "#[derive(prost::Message)]", "crates/edge/src/f.rs:1 wire-shapes"),
            ("README.md", "a \nb", "README.md:1 trailing-blanks"),
        ] {
            assert_eq!(found(check, &[(path, text)]), [finds], "{path}");
        }
    }

    #[test]
    fn what_only_looks_like_a_breach_is_let_through() {
        let written = format!("\"\"\"Written by tools/gen.py. Do not edit.\"\"\"\n{}", "\n".repeat(1001));
        for (path, text) in [
            ("sdk/generated.py", written.as_str()),
            ("crates/sys/src/a.rs", "unsafe { f() }"),
            ("crates/edge/src/a.rs", "// unsafe is not for us\nlet s = \"unsafe\";"),
            ("crates/edge/src/b.rs", "#![deny(unsafe_code)]"),
            ("crates/proto/src/a.rs", "#[derive(ToSchema, prost::Message)]"),
            ("crates/model/src/a.rs", "/// Unlike std::fs, an InstantX knows nothing."),
            ("crates/edge/src/uncommon.rs", "mod uncommon;"),
            ("image.png", "a "),
        ] {
            assert_eq!(found(check, &[(path, text)]), Vec::<String>::new(), "{path}");
        }
    }
}
