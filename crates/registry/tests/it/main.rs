//! The whole way to an image, against a fake registry: the real one is in the end-to-end tests.

#![allow(clippy::unwrap_used, reason = "in tests a panic is the report")]

mod blobs;
mod documents;
mod support;
