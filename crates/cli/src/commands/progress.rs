//! Progress on standard error, where a person looks.

use std::io::IsTerminal;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};

/// A bar of bytes. `total`: where it is known. Hidden unless standard error is a terminal.
pub(crate) fn bytes(what: &str, total: Option<u64>, quiet: bool) -> ProgressBar {
    if quiet || !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let bar = match total {
        Some(total) => ProgressBar::new(total),
        None => ProgressBar::new_spinner(),
    };
    let template = match total {
        Some(_) => "{msg} {wide_bar} {binary_bytes}/{binary_total_bytes} {binary_bytes_per_sec} {eta}",
        None => "{spinner} {msg} {binary_bytes} {binary_bytes_per_sec}",
    };
    dress(bar, what, template)
}

/// A bar of things, of which there are `total`.
pub(crate) fn things(what: &str, total: u64, quiet: bool) -> ProgressBar {
    if quiet || !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    dress(ProgressBar::new(total), what, "{msg} {wide_bar} {pos}/{len} {eta}")
}

/// A spinner whose message changes.
pub(crate) fn spinner(what: &str, quiet: bool) -> ProgressBar {
    if quiet || !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    dress(ProgressBar::new_spinner(), what, "{spinner} {msg}")
}

fn dress(bar: ProgressBar, what: &str, template: &str) -> ProgressBar {
    if let Ok(style) = ProgressStyle::with_template(template) {
        bar.set_style(style.progress_chars("=> "));
    }
    bar.set_message(what.to_owned());
    bar.enable_steady_tick(Duration::from_millis(120));
    bar
}
