//! Requests about what nodes run.

use std::path::Path;
use std::time::Duration;

use dsec_proto::rest::{
    ChangeBegun, EndTrialRequest, NodeRelease, ReleaseName, StoredRelease, TryConfigRequest,
    TryReleaseRequest,
};
use futures_util::stream::try_unfold;
use reqwest::{Method, header};
use tokio::io::AsyncReadExt as _;

use super::{Client, ClientError};
use crate::parse::segment;

/// Longest time that sending a release to one node may take.
const SEND_WITHIN: Duration = Duration::from_secs(1800);
/// Bytes that are read of it at once.
const CHUNK: usize = 256 << 10;

fn node_path(node: &str, what: &str) -> String {
    format!("/nodes/{}/{what}", segment(node))
}

impl Client {
    /// What a node runs.
    pub(crate) async fn node_release(&self, node: &str) -> Result<NodeRelease, ClientError> {
        self.json(self.request(Method::GET, &node_path(node, "release"))).await
    }

    /// Sends a node a release, which lies in an archive of `length` bytes.
    pub(crate) async fn put_release(
        &self,
        node: &str,
        release: &ReleaseName,
        archive: &Path,
        length: u64,
    ) -> Result<StoredRelease, ClientError> {
        let path = node_path(node, &format!("releases/{release}"));
        let bytes = try_unfold((archive.to_owned(), None), |(path, file)| async move {
            let mut file = match file {
                Some(file) => file,
                None => tokio::fs::File::open(&path).await?,
            };
            let mut chunk = Vec::with_capacity(CHUNK);
            let read = file.read_buf(&mut chunk).await?;
            Ok::<_, std::io::Error>((read > 0).then_some((chunk, (path, Some(file)))))
        });
        let request = self
            .request(Method::PUT, &path)
            .header(header::CONTENT_LENGTH, length)
            .body(reqwest::Body::wrap_stream(bytes));
        self.json_within(request, SEND_WITHIN).await
    }

    /// Has a node try other programs.
    pub(crate) async fn try_release(
        &self,
        node: &str,
        request: &TryReleaseRequest,
    ) -> Result<ChangeBegun, ClientError> {
        self.json(self.request(Method::POST, &node_path(node, "release/try")).json(request)).await
    }

    /// Has a node try another configuration.
    pub(crate) async fn try_config(
        &self,
        node: &str,
        request: &TryConfigRequest,
    ) -> Result<ChangeBegun, ClientError> {
        self.json(self.request(Method::POST, &node_path(node, "config/try")).json(request)).await
    }

    /// Ends what a node tries.
    pub(crate) async fn end_trial(
        &self,
        node: &str,
        request: &EndTrialRequest,
    ) -> Result<NodeRelease, ClientError> {
        self.json(self.request(Method::POST, &node_path(node, "trial/end")).json(request)).await
    }
}
