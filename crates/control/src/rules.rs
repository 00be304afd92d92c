//! What each path needs of its caller. A path that is not here lets nobody in.

use std::collections::HashMap;
use std::sync::LazyLock;

use dsec_model::iam::Permission;
use dsec_model::iam::Permission::{
    AuditRead, LayerPack, LayerRead, LayerWrite, NodeManage, NodeRead, ProjectRead, SandboxCreate,
    SandboxRead, SandboxStop, SandboxUse,
};
use http::Method;

/// What a call needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rule {
    /// A key; what it may do is asked where it is done.
    Key,
    /// This in the root: it concerns the cluster.
    Cluster(Permission),
    /// Everything in the root: whoever may make this call is root on the nodes.
    Everything,
    /// This in the project that the call acts in.
    Project(Permission),
    /// This in the project of the sandbox, which its node knows.
    Sandbox(Permission),
    /// It concerns everything that the caller may do this to, in the project that the call acts in and below.
    Below(Permission),
}

use Rule::{Below, Cluster, Everything, Key, Project, Sandbox};

/// Method, `*` for any; path; what it needs.
const RULES: &[(&str, &str, Rule)] = &[
    ("GET", "/metrics", Cluster(NodeRead)),
    ("GET", "/v1/whoami", Key),
    ("*", "/v1/projects", Key),
    ("*", "/v1/projects/{project}", Key),
    ("POST", "/v1/projects/{project}/stop", Below(SandboxStop)),
    ("POST", "/v1/projects/{project}/pause", Below(SandboxStop)),
    ("POST", "/v1/projects/{project}/resume", Below(SandboxStop)),
    ("POST", "/v1/projects/{project}/wait", Below(SandboxRead)),
    ("*", "/v1/identities", Key),
    ("*", "/v1/identities/{identity}", Key),
    ("*", "/v1/identities/{identity}/keys", Key),
    ("DELETE", "/v1/keys/{key}", Key),
    ("*", "/v1/grants", Key),
    ("DELETE", "/v1/grants/{grant}", Key),
    ("GET", "/v1/audit", Below(AuditRead)),
    ("GET", "/v1/nodes", Cluster(NodeRead)),
    ("GET", "/v1/nodes/{node}", Cluster(NodeRead)),
    ("POST", "/v1/nodes/{node}/cordon", Cluster(NodeManage)),
    ("POST", "/v1/nodes/{node}/uncordon", Cluster(NodeManage)),
    ("POST", "/v1/nodes/{node}/drain", Cluster(NodeManage)),
    ("GET", "/v1/pools", Cluster(NodeRead)),
    ("POST", "/v1/pools/{pool}/sync", Cluster(NodeManage)),
    ("GET", "/v1/nodes/{node}/release", Cluster(NodeRead)),
    ("PUT", "/v1/nodes/{node}/releases/{release}", Everything),
    ("POST", "/v1/nodes/{node}/release/try", Everything),
    ("POST", "/v1/nodes/{node}/config/try", Cluster(NodeManage)),
    ("POST", "/v1/nodes/{node}/trial/end", Cluster(NodeManage)),
    ("GET", "/v1/cluster", Cluster(NodeRead)),
    ("POST", "/v1/cluster", Cluster(NodeManage)),
    ("POST", "/v1/cluster/tokens", Cluster(NodeManage)),
    ("GET", "/v1/cluster/nodes", Cluster(NodeRead)),
    ("DELETE", "/v1/cluster/nodes/{node}", Cluster(NodeManage)),
    ("GET", "/v1/images", Project(LayerRead)),
    ("GET", "/v1/images/{name}", Project(LayerRead)),
    ("PUT", "/v1/images/{name}", Project(LayerWrite)),
    ("DELETE", "/v1/images/{name}", Project(LayerWrite)),
    ("POST", "/v1/images/{name}/pull", Project(LayerWrite)),
    ("GET", "/v1/layers/{kind}", Project(LayerRead)),
    ("GET", "/v1/layers/{kind}/{name}", Project(LayerRead)),
    ("PUT", "/v1/layers/{kind}/{name}", Project(LayerWrite)),
    ("DELETE", "/v1/layers/{kind}/{name}", Project(LayerWrite)),
    ("POST", "/v1/layers/{kind}/{name}/pull", Project(LayerWrite)),
    ("GET", "/v1/layers/{kind}/{name}/trace", Project(LayerRead)),
    ("POST", "/v1/layers/{kind}/{name}/prefetch", Project(LayerRead)),
    ("POST", "/v1/layers/{kind}/{name}/verify", Project(LayerRead)),
    ("GET", "/v1/layers/{kind}/{name}/export", Project(LayerRead)),
    ("PUT", "/v1/layers/{kind}/{name}/tags/{tag}", Project(LayerWrite)),
    ("GET", "/v1/steps/{key}", Project(LayerRead)),
    ("PUT", "/v1/steps/{key}/names/{name}", Project(LayerWrite)),
    ("POST", "/v1/store/verify", Cluster(LayerRead)),
    ("POST", "/v1/store/collect", Cluster(LayerWrite)),
    ("GET", "/v1/tasks", Below(SandboxRead)),
    ("GET", "/v1/tasks/{task}", Below(SandboxRead)),
    ("POST", "/v1/tasks/{task}/stop", Below(SandboxStop)),
    ("POST", "/v1/tasks/{task}/pause", Below(SandboxStop)),
    ("POST", "/v1/tasks/{task}/resume", Below(SandboxStop)),
    ("POST", "/v1/tasks/{task}/wait", Below(SandboxRead)),
    ("GET", "/v1/counts", Below(SandboxRead)),
    ("GET", "/v1/sandboxes", Below(SandboxRead)),
    ("POST", "/v1/sandboxes", Project(SandboxCreate)),
    ("POST", "/v1/sandboxes/batch", Project(SandboxCreate)),
    ("GET", "/v1/sandboxes/{id}", Sandbox(SandboxRead)),
    ("PATCH", "/v1/sandboxes/{id}", Sandbox(SandboxStop)),
    ("DELETE", "/v1/sandboxes/{id}", Sandbox(SandboxStop)),
    ("POST", "/v1/sandboxes/{id}/stop", Sandbox(SandboxStop)),
    ("POST", "/v1/sandboxes/{id}/pause", Sandbox(SandboxStop)),
    ("POST", "/v1/sandboxes/{id}/resume", Sandbox(SandboxStop)),
    ("GET", "/v1/sandboxes/{id}/logs", Sandbox(SandboxRead)),
    ("POST", "/v1/sandboxes/{id}/pack", Sandbox(LayerPack)),
    ("*", "/v1/sandboxes/{id}/execs", Sandbox(SandboxUse)),
    ("GET", "/v1/sandboxes/{id}/execs/{eid}", Sandbox(SandboxUse)),
    ("GET", "/v1/sandboxes/{id}/execs/{eid}/stdout", Sandbox(SandboxUse)),
    ("GET", "/v1/sandboxes/{id}/execs/{eid}/stderr", Sandbox(SandboxUse)),
    ("GET", "/v1/sandboxes/{id}/execs/{eid}/attach", Sandbox(SandboxUse)),
    ("PUT", "/v1/sandboxes/{id}/execs/{eid}/stdin", Sandbox(SandboxUse)),
    ("POST", "/v1/sandboxes/{id}/execs/{eid}/signal", Sandbox(SandboxUse)),
    ("POST", "/v1/sandboxes/{id}/execs/{eid}/resize", Sandbox(SandboxUse)),
    ("*", "/v1/sandboxes/{id}/sessions", Sandbox(SandboxUse)),
    ("*", "/v1/sandboxes/{id}/sessions/{sid}", Sandbox(SandboxUse)),
    ("*", "/v1/sandboxes/{id}/files", Sandbox(SandboxUse)),
    ("GET", "/v1/sandboxes/{id}/files/stat", Sandbox(SandboxUse)),
    ("GET", "/v1/sandboxes/{id}/files/list", Sandbox(SandboxUse)),
    ("POST", "/v1/sandboxes/{id}/files/mkdir", Sandbox(SandboxUse)),
    ("POST", "/v1/sandboxes/{id}/files/move", Sandbox(SandboxUse)),
    ("GET", "/v1/sandboxes/{id}/files/watch", Sandbox(SandboxUse)),
    ("*", "/v1/sandboxes/{id}/archive", Sandbox(SandboxUse)),
    ("*", "/v1/sandboxes/{id}/ports/{port}/http", Sandbox(SandboxUse)),
    ("*", "/v1/sandboxes/{id}/ports/{port}/http/", Sandbox(SandboxUse)),
    ("*", "/v1/sandboxes/{id}/ports/{port}/http/{*path}", Sandbox(SandboxUse)),
    ("GET", "/v1/sandboxes/{id}/ports/{port}/tcp", Sandbox(SandboxUse)),
];

static BY_PATH: LazyLock<HashMap<&'static str, Vec<(&'static str, Rule)>>> = LazyLock::new(|| {
    let mut by_path: HashMap<_, Vec<_>> = HashMap::new();
    for (method, path, rule) in RULES {
        by_path.entry(*path).or_default().push((*method, *rule));
    }
    by_path
});

/// What a call of a path needs. None: nobody is let in.
pub fn of(method: &Method, path: &str) -> Option<Rule> {
    // Whoever may read may ask for the head of it.
    let method = if *method == Method::HEAD { "GET" } else { method.as_str() };
    let rules = BY_PATH.get(path)?;
    rules.iter().find(|(of, _)| *of == "*" || *of == method).map(|(_, rule)| *rule)
}

/// What somebody must be able to do to see projects, identities and grants.
pub const READS: Permission = ProjectRead;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_call_of_the_document_has_a_rule_and_every_rule_a_path() {
        let document: serde_json::Value = serde_json::from_str(crate::openapi::document()).unwrap();
        for (path, item) in document["paths"].as_object().unwrap() {
            let route = path.replace("{path}", "{*path}");
            for (method, operation) in item.as_object().unwrap() {
                // Those that anybody may ask say so.
                let is_open = operation["security"]
                    .as_array()
                    .is_some_and(|needs| needs.iter().all(|need| need == &serde_json::json!({})));
                let method = Method::from_bytes(method.to_uppercase().as_bytes()).unwrap();
                assert_eq!(of(&method, &route).is_none(), is_open, "{method} {route}");
            }
        }
        for (_, path, _) in RULES {
            assert!(crate::api::ROUTES.contains(path), "{path}");
        }
    }

    #[test]
    fn what_changes_needs_more_than_what_looks() {
        for (method, path, rule) in RULES {
            let needs = match rule {
                Key | Everything => continue,
                Cluster(needs) | Project(needs) | Sandbox(needs) | Below(needs) => *needs,
            };
            let viewer = dsec_model::iam::Role::Viewer.permissions() | [AuditRead].into_iter().collect();
            let looks = viewer.has(needs);
            let may_look = ["GET", "*"].contains(method)
                || ["verify", "prefetch", "wait"].iter().any(|word| path.ends_with(word));
            assert!(!looks || may_look, "{method} {path} needs {needs} only");
        }
    }
}
