//! Who may do what where, and how much of it. Pure: rules over projects, identities and grants; where those are kept, and how
//! a key finds its identity, is control's.
//!
//! ```text
//! root ─► rl ─► job-42 ─► agent-7          projects nest to any depth
//!   ▲      ▲
//!   │      └ grant: builder to ci, by alice ─ counts for as much as alice still holds in rl
//!   └ grant: everything to alice
//! ```
//!
//! What somebody holds is worked out at every use, not when it is given: who takes something from a grantor or a project takes it
//! from all that came of it, in the same moment.

mod ledger;
mod permissions;
mod policy;
mod project;
mod quota;
mod scope;

pub use ledger::{Ledger, Outcome, Share, Ticket};
pub use permissions::{Permission, Permissions, Role};
pub use policy::{Grant, GrantId, Grantor, IdentityId, NotHeld, Policy};
pub use project::{ProjectError, ProjectPath};
pub use quota::{Amounts, Backend, Counted, Exceeded, Resource, add, amounts_of, subtract};
pub use scope::Scope;
