//! Recipes of environments: a base, and steps over it.
//!
//! ```text
//! recipe.toml ─┐                          key of the base's layer
//! Dockerfile ──┴─► Recipe: base, steps ──► plan: a key for each step ──► the last one that is there ──► steps left to do
//!                                            ▲ content of copied files
//! ```
//!
//! Pure: no file is read, nothing is run. Whoever builds reads the text, says what copied files hold, runs what is left in a sandbox
//! and packs it after each step under the step's key.

mod dockerfile;
mod ignore;
mod plan;
mod recipe;
mod substitute;
mod written;

pub use dockerfile::{Arguments, from_dockerfile};
pub use ignore::{Ignore, IgnoreError};
pub use plan::{Key, Plan, Planned, plan};
pub use recipe::{Action, Base, Command, Recipe, RecipeError, Step};
pub use written::from_toml;
