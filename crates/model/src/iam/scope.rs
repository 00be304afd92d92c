//! A part of the project tree: where somebody may do something.

use std::fmt;
use std::str::FromStr;

use super::project::{ProjectError, ProjectPath};

/// Projects with all that are in them, less others with all that are in those.
///
/// As text, which a header between control and edges can be, the projects in it and, each after a `!`, those that are not:
/// `root/rl root/eval !root/rl/secret`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Scope {
    within: Vec<ProjectPath>,
    without: Vec<ProjectPath>,
}

impl Scope {
    /// Nothing.
    pub const NOTHING: Self = Self { within: Vec::new(), without: Vec::new() };

    /// Everything.
    pub fn everything() -> Self {
        Self::of(ProjectPath::root())
    }

    /// A project and all that are in it.
    pub fn of(project: ProjectPath) -> Self {
        Self { within: vec![project], without: Vec::new() }
    }

    /// All of `within` but what is in one of `without`.
    pub(super) fn new(within: Vec<ProjectPath>, without: Vec<ProjectPath>) -> Self {
        let is_outermost = |it: &ProjectPath, all: &[ProjectPath]| {
            !all.iter().any(|above| above != it && it.is_within(above))
        };
        let outermost = |mut all: Vec<ProjectPath>| -> Vec<ProjectPath> {
            all.sort_unstable();
            all.dedup();
            all.iter().filter(|it| is_outermost(it, &all)).cloned().collect()
        };
        let (within, without) = (outermost(within), outermost(without));
        let within: Vec<_> =
            within.into_iter().filter(|it| !without.iter().any(|cut| it.is_within(cut))).collect();
        let matters = |cut: &ProjectPath| within.iter().any(|it| cut.is_within(it));
        let without = without.into_iter().filter(matters).collect();
        Self { within, without }
    }

    /// Whether there is nothing in it.
    pub fn is_nothing(&self) -> bool {
        self.within.is_empty()
    }

    /// Whether a project is in it.
    pub fn has(&self, project: &ProjectPath) -> bool {
        let is_in = |of: &[ProjectPath]| of.iter().any(|it| project.is_within(it));
        is_in(&self.within) && !is_in(&self.without)
    }

    /// What of it is in a project.
    #[must_use]
    pub fn in_project(self, project: &ProjectPath) -> Self {
        let part = |it: ProjectPath| {
            if it.is_within(project) {
                Some(it)
            } else if project.is_within(&it) {
                Some(project.clone())
            } else {
                None
            }
        };
        Self::new(self.within.into_iter().filter_map(part).collect(), self.without)
    }
}

impl fmt::Display for Scope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let within = self.within.iter().map(|it| ("", it));
        let without = self.without.iter().map(|it| ("!", it));
        for (at, (sign, project)) in within.chain(without).enumerate() {
            let gap = if at == 0 { "" } else { " " };
            write!(f, "{gap}{sign}{project}")?;
        }
        Ok(())
    }
}

impl FromStr for Scope {
    type Err = ProjectError;

    fn from_str(text: &str) -> Result<Self, ProjectError> {
        let (mut within, mut without) = (Vec::new(), Vec::new());
        for part in text.split(' ').filter(|part| !part.is_empty()) {
            match part.strip_prefix('!') {
                Some(project) => without.push(project.parse()?),
                None => within.push(part.parse()?),
            }
        }
        Ok(Self::new(within, without))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn scope(text: &str) -> Scope {
        text.parse().unwrap()
    }

    fn path(text: &str) -> ProjectPath {
        text.parse().unwrap()
    }

    #[test]
    fn what_is_cut_out_stays_out() {
        let scope = scope("root/rl root/eval !root/rl/secret !root/other");
        assert_eq!(scope.to_string(), "root/eval root/rl !root/rl/secret");
        for (project, is_in) in [
            ("root", false),
            ("root/rl", true),
            ("root/rl/job", true),
            ("root/rl/secret", false),
            ("root/rl/secret/a", false),
            ("root/rl/secrets", true),
            ("root/other", false),
        ] {
            assert_eq!(scope.has(&path(project)), is_in, "{project}");
        }
        assert_eq!(super::Scope::new(vec![path("root/a")], vec![path("root")]), Scope::NOTHING);
        assert!(Scope::everything().has(&path("root/any/where")) && !Scope::NOTHING.has(&path("root")));
    }

    #[test]
    fn what_is_no_project_is_no_scope() {
        for bad in ["rl", "root/rl !", "root/rl,root/b", "!!root"] {
            assert!(bad.parse::<Scope>().is_err(), "{bad}");
        }
        assert!(scope("").is_nothing());
    }

    const PROJECTS: [&str; 7] =
        ["root", "root/a", "root/a/b", "root/a/b/c", "root/a/d", "root/e", "root/e/f"];

    fn some() -> impl Strategy<Value = Vec<ProjectPath>> {
        let project = (0..PROJECTS.len()).prop_map(|at| path(PROJECTS[at]));
        proptest::collection::vec(project, 0..4)
    }

    proptest! {
        #[test]
        fn shortening_changes_nothing(within in some(), without in some(), only in 0..PROJECTS.len()) {
            let scope = Scope::new(within.clone(), without.clone());
            prop_assert_eq!(&scope.to_string().parse::<Scope>().unwrap(), &scope);
            let only = path(PROJECTS[only]);
            let narrowed = scope.clone().in_project(&only);
            for project in PROJECTS.map(path) {
                let is_in = within.iter().any(|it| project.is_within(it)) && !without.iter().any(|it| project.is_within(it));
                prop_assert_eq!(scope.has(&project), is_in);
                prop_assert_eq!(narrowed.has(&project), is_in && project.is_within(&only));
            }
        }
    }
}
