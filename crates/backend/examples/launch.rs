//! Launches containers one after another without an edge, and prints where the time goes:
//! `cargo run --release -p dsec-backend --example launch -- STATE_DIR AGENT COUNT LAYER.erofs...`, the lowest layer first.

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::time::{Duration, Instant};

use dsec_backend::NodePaths;
use dsec_backend::container::{ContainerBackend, ContainerSpec, Layer};
use dsec_model::Limits;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [state, agent, count, layers @ ..] = args.as_slice() else {
        return Err("usage: launch STATE_DIR AGENT COUNT LAYER.erofs...".into());
    };
    std::fs::create_dir_all(state)?;
    let backend = ContainerBackend::start(&NodePaths { state_dir: state.into(), aether: agent.into() })?;
    let mut phases: BTreeMap<String, Vec<Duration>> = BTreeMap::new();
    let (mut launches, mut ends) = (Vec::new(), Vec::new());
    for i in 0..count.parse()? {
        let spec = ContainerSpec {
            name: format!("launch{i}"),
            layers: layers.iter().map(|image| Layer { image: image.into(), devices: Vec::new() }).collect(),
            limits: Limits::default(),
            env: vec![b"PATH=/usr/bin:/bin".to_vec()],
            cwd: b"/".to_vec(),
            user: "root".into(),
            hostname: format!("launch{i}"),
            allow_setuid: false,
        };
        let started = Instant::now();
        let (container, took) = backend.launch(&spec)?;
        launches.push(started.elapsed());
        for phase in took {
            phases.entry(phase.name).or_default().push(phase.took);
        }
        let started = Instant::now();
        container.kill();
        container.clean_up()?;
        ends.push(started.elapsed());
    }
    let median = |times: &mut Vec<Duration>| {
        times.sort();
        times.get(times.len() / 2).map_or(0, Duration::as_micros)
    };
    let mut out = io::stdout();
    for (name, times) in &mut phases {
        writeln!(out, "{name:16} {:6} us", median(times))?;
    }
    writeln!(out, "launch {} us, end {} us (medians)", median(&mut launches), median(&mut ends))?;
    backend.shut_down()?;
    Ok(())
}
