//! A create request, checked: everything that can be refused before anything is done.

use std::collections::BTreeMap;

use dsec_image::ImageConfig;
use dsec_model::limits::{burst_ms_max, cores_to_millis};
use dsec_model::{Capacity, ErrorKind, Limits, PoolName};
use dsec_proto::rest::{ApiError, BACKEND_CONTAINER, CreateSandboxRequest, UpdateSandboxRequest};

use crate::error::{bad_limit, invalid, invalid_field};
use crate::sandbox::run;

/// Most labels of a sandbox.
const LABELS_MAX: usize = 64;
/// Longest label key, bytes.
const LABEL_KEY_MAX: usize = 63;
/// Longest label value, bytes.
const LABEL_VALUE_MAX: usize = 255;
/// Longest host name: `HOST_NAME_MAX` of Linux.
const HOSTNAME_MAX: usize = 64;
/// Longest label of a host name. Source: RFC 1123, 2.1.
const HOSTNAME_LABEL_MAX: usize = 63;
/// Longest path that a system call takes (`PATH_MAX` with its NUL).
const PATH_MAX: usize = 4095;
/// Longest user name or `uid:gid`.
const USER_MAX: usize = 256;

/// Checks what does not depend on the image.
///
/// # Errors
/// The first thing that cannot be had, with its field.
pub fn check(request: &CreateSandboxRequest, defaults: &Limits, node: &Capacity) -> Result<Limits, ApiError> {
    if request.backend != BACKEND_CONTAINER {
        return Err(ApiError::new(
            ErrorKind::Unsupported,
            format!("this node has no backend {:?}; it has: {BACKEND_CONTAINER}", request.backend),
        ));
    }
    if let Some((service, _)) = request.network_rules.iter().find(|(_, allowed)| **allowed) {
        return Err(ApiError::new(
            ErrorKind::Unsupported,
            format!(
                "network_rules allows {service:?}, and this version gives sandboxes no network but loopback"
            ),
        )
        .hint("leave network_rules out, and put what is needed into the image or upload it"));
    }
    if let Some(pool) = &request.pool {
        let named: Result<PoolName, _> = pool.parse();
        named.map_err(|error| invalid_field("pool", error.to_string()))?;
    }
    labels("labels", &request.labels)?;
    labels("node_labels", &request.node_labels)?;
    if request.node_features.len() > LABELS_MAX {
        return Err(invalid_field(
            "node_features",
            format!("{} node_features were given; {LABELS_MAX} is the most", request.node_features.len()),
        ));
    }
    if let Some(hostname) = &request.hostname {
        check_hostname(hostname)?;
    }
    run::check_env(&request.env)?;
    if let Some(cwd) = &request.cwd {
        check_path("cwd", cwd)?;
        if !cwd.starts_with('/') {
            return Err(invalid_field("cwd", format!("cwd is {cwd:?}; it must be an absolute path")));
        }
    }
    if let Some(user) = &request.init_user {
        check_user("init_user", user)?;
    }
    if let Some(exec) = &request.exec {
        run::check(exec).map_err(|error| {
            let message = format!("exec: {}", error.0.message);
            ApiError::new(error.kind(), message).detail(error.0.detail.clone()).hint(error.0.hint.clone())
        })?;
    }
    let limits = limits(request, defaults, node)?;
    limits.check(node).map_err(|e| bad_limit(&e))?;
    Ok(limits)
}

fn labels(field: &str, labels: &BTreeMap<String, String>) -> Result<(), ApiError> {
    if labels.len() > LABELS_MAX {
        return Err(invalid_field(
            field,
            format!("{} {field} were given; {LABELS_MAX} is the most", labels.len()),
        ));
    }
    for (key, value) in labels {
        if key.is_empty() || key.len() > LABEL_KEY_MAX || key.contains('=') {
            return Err(invalid_field(
                field,
                format!(
                    "the label {key:?} has {} bytes; keys have 1 to {LABEL_KEY_MAX} and no '='",
                    key.len()
                ),
            ));
        }
        if value.len() > LABEL_VALUE_MAX {
            return Err(invalid_field(
                field,
                format!(
                    "the value of label {key:?} has {} bytes; {LABEL_VALUE_MAX} is the most",
                    value.len()
                ),
            ));
        }
    }
    Ok(())
}

fn check_hostname(hostname: &str) -> Result<(), ApiError> {
    let label = |label: &str| {
        !label.is_empty()
            && label.len() <= HOSTNAME_LABEL_MAX
            && label.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-')
            && !label.starts_with('-')
            && !label.ends_with('-')
    };
    if hostname.len() <= HOSTNAME_MAX && hostname.split('.').all(label) {
        return Ok(());
    }
    Err(invalid_field(
        "hostname",
        format!(
            "{hostname:?} is no host name: up to {HOSTNAME_MAX} letters, digits and '-', in parts between dots"
        ),
    ))
}

/// Checks a path of a request.
///
/// # Errors
/// It is empty, too long, or has a NUL byte.
pub fn check_path(field: &str, path: &str) -> Result<(), ApiError> {
    if path.is_empty() {
        return Err(invalid_field(field, format!("{field} is empty; give a path")));
    }
    if path.contains('\0') {
        return Err(invalid_field(field, format!("{field} contains a NUL byte")));
    }
    if path.len() > PATH_MAX {
        return Err(invalid_field(
            field,
            format!("{field} has {} bytes; {PATH_MAX} is the most", path.len()),
        ));
    }
    Ok(())
}

/// Checks the form of a user; whether it exists only the sandbox knows.
///
/// # Errors
/// It is empty, too long, or has a byte that no user name has.
pub fn check_user(field: &str, user: &str) -> Result<(), ApiError> {
    let plain = user.bytes().all(|b| b.is_ascii_graphic() || b >= 0x80);
    if user.is_empty() || user.len() > USER_MAX || !plain {
        return Err(invalid_field(
            field,
            format!(
                "{field} is {user:?}; it must be a user's name or uid[:gid], of at most {USER_MAX} bytes"
            ),
        ));
    }
    Ok(())
}

/// Limits of a sandbox that does not say which it wants: no more than the node has.
pub fn defaults_on(defaults: &Limits, node: &Capacity) -> Limits {
    let cpu_millis = defaults.cpu_millis.min(node.cpu_millis);
    Limits {
        memory_mib: defaults.memory_mib.min(node.memory_mib),
        cpu_millis,
        cpu_burst_ms: defaults.cpu_burst_ms.min(burst_ms_max(cpu_millis)),
        disk_mib: defaults.disk_mib.min(node.disk_mib),
        ..defaults.clone()
    }
}

fn limits(request: &CreateSandboxRequest, defaults: &Limits, node: &Capacity) -> Result<Limits, ApiError> {
    let defaults = defaults_on(defaults, node);
    let cpu_millis = match request.cpu_cores_limit {
        None => defaults.cpu_millis,
        Some(cores) => cores_to_millis(cores).ok_or_else(|| {
            invalid_field(
                "cpu_cores_limit",
                format!("cpu_cores_limit is {cores}; it must be a positive number"),
            )
        })?,
    };
    Ok(Limits {
        memory_mib: request.memory_limit_mb.unwrap_or(defaults.memory_mib),
        cpu_millis,
        cpu_burst_ms: request.cpu_burst_ms.unwrap_or(defaults.cpu_burst_ms.min(burst_ms_max(cpu_millis))),
        cpu_weight: request.cpu_weight.unwrap_or(defaults.cpu_weight),
        cpu_class: request.cpu_class.unwrap_or(defaults.cpu_class),
        pids: request.pids_limit.unwrap_or(defaults.pids),
        nofile: request.open_files_limit.unwrap_or(defaults.nofile),
        disk_mib: request.disk_limit_mb.unwrap_or(defaults.disk_mib),
        disk_files: request.disk_files_limit.unwrap_or(defaults.disk_files),
        max_lifetime_s: request.max_lifetime.unwrap_or(defaults.max_lifetime_s),
        ttl_running_stop_s: request.ttl_running_stop.unwrap_or(defaults.ttl_running_stop_s),
        ttl_paused_stop_s: request.ttl_paused_stop.unwrap_or(defaults.ttl_paused_stop_s),
        auto_pause: request.auto_pause.unwrap_or(defaults.auto_pause),
    })
}

/// The limits of a sandbox with what an update asks for over them.
///
/// # Errors
/// It asks for nothing, or for what cannot be had.
pub fn updated(limits: &Limits, request: &UpdateSandboxRequest, node: &Capacity) -> Result<Limits, ApiError> {
    if *request == UpdateSandboxRequest::default() {
        return Err(invalid("the request updates nothing").hint("give cpu_class, cpu_weight or both"));
    }
    let limits = Limits {
        cpu_weight: request.cpu_weight.unwrap_or(limits.cpu_weight),
        cpu_class: request.cpu_class.unwrap_or(limits.cpu_class),
        ..limits.clone()
    };
    limits.check(node).map_err(|e| bad_limit(&e))?;
    Ok(limits)
}

/// An image's environment with other variables over it, by name.
pub fn env_over(config: &ImageConfig, over: &BTreeMap<String, String>) -> Vec<String> {
    let mut env: BTreeMap<&str, &str> = config.env.iter().filter_map(|line| line.split_once('=')).collect();
    env.extend(over.iter().map(|(key, value)| (key.as_str(), value.as_str())));
    env.iter().map(|(key, value)| format!("{key}={value}")).collect()
}

/// Environment of the sandbox's commands: the image's, with the request's over it.
///
/// # Errors
/// Together they are larger than a command's environment can be.
pub fn environment(config: &ImageConfig, request: &CreateSandboxRequest) -> Result<Vec<String>, ApiError> {
    let env = env_over(config, &request.env);
    let bytes: usize = env.iter().map(|line| line.len() + 1).sum();
    // Half is left to the command's own arguments and environment.
    if bytes > run::ARG_BYTES_MAX / 2 {
        return Err(invalid(format!(
            "env has {bytes} bytes with the image's; {} is the most for a sandbox",
            run::ARG_BYTES_MAX / 2
        ))
        .detail(serde_json::json!({ "field": "env" })));
    }
    Ok(env)
}

#[cfg(test)]
mod tests {
    use super::*;

    const NODE: Capacity = Capacity { memory_mib: 1000, cpu_millis: 2000, disk_mib: 8000, processes: 0 };

    fn request() -> CreateSandboxRequest {
        serde_json::from_str(r#"{"container_image": "x"}"#).unwrap()
    }

    fn refused(change: impl FnOnce(&mut CreateSandboxRequest)) -> ApiError {
        let mut request = request();
        change(&mut request);
        check(&request, &Limits::default(), &NODE).unwrap_err()
    }

    #[test]
    fn defaults_are_lowered_to_the_node_and_wishes_are_not() {
        let of_one_core = Capacity { cpu_millis: 1000, ..NODE };
        defaults_on(&Limits::default(), &of_one_core).check(&of_one_core).unwrap();
        let limits = check(&request(), &Limits::default(), &NODE).unwrap();
        assert_eq!((limits.memory_mib, limits.disk_mib), (1000, 8000));
        assert_eq!((limits.cpu_millis, limits.cpu_burst_ms), (2000, 200));
        let error = refused(|r| r.memory_limit_mb = Some(1001));
        assert_eq!(error.0.detail["field"], "memory_limit_mb");
    }

    #[test]
    fn what_cannot_be_had_names_its_field() {
        let field = |error: ApiError| error.0.detail["field"].as_str().unwrap_or_default().to_owned();
        assert_eq!(field(refused(|r| r.hostname = Some("-x".into()))), "hostname");
        assert_eq!(field(refused(|r| r.hostname = Some("a".repeat(65)))), "hostname");
        assert_eq!(field(refused(|r| r.cwd = Some("rel".into()))), "cwd");
        assert_eq!(field(refused(|r| r.cwd = Some("/a\0".into()))), "cwd");
        assert_eq!(field(refused(|r| r.init_user = Some("a b".into()))), "init_user");
        assert_eq!(field(refused(|r| r.cpu_cores_limit = Some(f64::NAN))), "cpu_cores_limit");
        assert_eq!(field(refused(|r| r.cpu_cores_limit = Some(9.0))), "cpu_cores_limit");
        assert_eq!(field(refused(|r| r.cpu_burst_ms = Some(201))), "cpu_burst_ms");
        assert_eq!(field(refused(|r| drop(r.labels.insert("k".repeat(64), "v".into())))), "labels");
        assert_eq!(field(refused(|r| drop(r.env.insert("A=B".into(), "v".into())))), "env");
    }

    #[test]
    fn backends_and_networks_that_are_not_built_are_unsupported() {
        assert_eq!(refused(|r| r.backend = "microvm".into()).kind(), ErrorKind::Unsupported);
        assert_eq!(
            refused(|r| r.network_rules.extend([("npm".into(), true)])).kind(),
            ErrorKind::Unsupported
        );
        let mut off = request();
        off.network_rules.insert("npm".into(), false);
        check(&off, &Limits::default(), &NODE).unwrap();
    }
}
