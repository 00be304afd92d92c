//! `dsec bench exec`: one `/bin/true` in a sandbox, there and back.

use std::time::Instant;

use bytes::Bytes;
use clap::Args;
use dsec_proto::rest::{Exec, ExecRequest};
use reqwest::{Method, header};

use super::create::succeeded;
use super::{Load, Report};
use crate::commands::Context;
use crate::failure::Failure;

pub(crate) const EXAMPLES: &str = "\
Examples:
  dsec bench exec --count 2000
  dsec bench exec --count 20000 --concurrency 16 --json";

/// Runs when `--count` is not given.
const COUNT: u64 = 1000;

/// `dsec bench exec`.
#[derive(Debug, Args)]
pub(crate) struct ExecBench {
    #[command(flatten)]
    load: Load,
}

/// Measures.
pub(super) async fn run(context: &Context, args: ExecBench) -> Result<Report, Failure> {
    let load = args.load;
    let request = ExecRequest { argv: vec!["/bin/true".into()], wait: true, ..ExecRequest::default() };
    let body = serde_json::to_vec(&request)
        .map(Bytes::from)
        .map_err(|error| Failure::new(format!("cannot write JSON: {error}")))?;
    let sandbox = load.sandbox(context, 0).await?;
    let path = format!("/sandboxes/{}/execs", sandbox.id);
    let once = |_| async {
        let start = Instant::now();
        let request = context.client.request(Method::POST, &path);
        let request = request.header(header::CONTENT_TYPE, "application/json").body(body.clone());
        let exec: Exec = context.client.json(request).await?;
        let took = start.elapsed();
        succeeded(&exec).map(|()| took)
    };
    let samples = load.drive(COUNT, "running", context.global.json, once).await;
    super::end(context, &sandbox.id).await;
    Ok(Report::new("exec", &load, &samples, |took| *took))
}
