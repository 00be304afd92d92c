//! A layer in the form that OCI archives have: whiteouts as names.

use crate::erofs::{Attributes, Content, FileData, LayerTree};
use crate::overlay;

/// A layer whose whiteouts are files `.wh.NAME`, and opaque directories have one called `.wh..wh..opq`; what only
/// overlayfs understands is left out, and so are sockets, which tar has no form for. The other way round is the intake.
///
/// Renamed directories must have been resolved: see [`super::resolve_redirects`].
pub fn oci_form(layer: &LayerTree) -> LayerTree {
    let mut out = layer.clone();
    let empty = || Content::File(FileData::empty());
    let attributes = || Attributes { mode: 0o644, ..Attributes::default() };
    for (dir, inode) in layer.tree.iter() {
        let Content::Directory(entries) = &inode.content else { continue };
        for (name, id) in entries {
            match layer.tree.get(*id).map(|inode| &inode.content) {
                Some(content) if overlay::is_whiteout(content) => {
                    out.tree.remove(dir, name);
                    let name = [b".wh.".as_slice(), name].concat();
                    out.tree.insert(dir, &name, attributes(), empty());
                }
                Some(Content::Socket) => {
                    out.tree.remove(dir, name);
                }
                _ => {}
            }
        }
        if overlay::is_opaque(&inode.attributes) {
            out.tree.insert(dir, b".wh..wh..opq", attributes(), empty());
        }
    }
    let marked: Vec<_> = out.tree.iter().map(|(id, inode)| (id, inode.attributes.clone())).collect();
    for (id, mut attributes) in marked.into_iter().filter(|(_, attributes)| attributes.xattrs.is_some()) {
        overlay::unmark(&mut attributes, |name| overlay::steers(name) && !name.starts_with(overlay::ESCAPED));
        out.tree.set_attributes(id, attributes);
    }
    out
}
