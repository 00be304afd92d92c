//! A tree with everything a file can be.

use std::path::Path;

use rustix::fs::{XattrFlags, lsetxattr};

use super::{run, shell};

/// Every kind of file GNU tar can hold, with everything that can be set on one.
pub(crate) fn source_tree(root: &Path) {
    shell(
        root,
        r#"
        umask 022
        mkdir -p empty deep/er/and/deeper bin
        printf '' > bin/empty; printf x > bin/one
        head -c 4095 /dev/urandom > bin/4095; head -c 4096 /dev/urandom > bin/4096
        head -c 4097 /dev/urandom > bin/4097; head -c 5000000 /dev/urandom > bin/large
        chmod 4755 bin/one; chmod 2711 bin/4096; chmod 1777 empty; chmod 000 bin/4097
        ln -s one bin/relative; ln -s /bin/one absolute; ln -s nowhere dangling
        ln -s "$(printf '%04000d' 7)" long-target
        ln bin/one deep/hard; ln bin/one deep/er/hard; ln dangling deep/linked-symlink
        mknod null c 1 3; mknod loop b 7 200; mknod far c 511 300000; mkfifo pipe
        chown 1000:1001 bin/one; chown 4000000000:70000 bin/4095; chown -h 5:6 dangling
        touch -d '1969-12-31T23:59:58.75Z' bin/4095; touch -d '2040-02-03T04:05:06.123456789Z' bin/one
        touch -h -d '2001-01-01T00:00:00.5Z' absolute
        name=$(printf '%0255d' 1); printf long > "$name"; mkdir "deep/$name"; printf long > "deep/$name/$name"
        printf 'bytes' > "$(printf 'not-\377\376-utf8')"; printf 's' > '!before-dots'; printf 's' > '-dash'
        printf 's' > '.hidden'; printf 's' > '..both'; printf 's' > 'new
line'
        cp /bin/true bin/capable; setcap cap_net_raw,cap_net_admin=ep bin/capable
        truncate -s 3000000 holes; printf middle | dd of=holes bs=1 seek=1500000 conv=notrunc status=none
        printf end | dd of=holes bs=1 seek=2999997 conv=notrunc status=none
        truncate -s 123457 only-hole
        "#,
    );
    let set = |path: &str, name: &str, value: &[u8]| {
        lsetxattr(root.join(path), name, value, XattrFlags::empty()).unwrap();
    };
    set("bin/4096", "user.comment", b"a value\0with zero and\nnewline");
    set("bin/4096", "user.equals=percent%", b"1");
    set("bin/4096", "user.empty", b"");
    set("bin/large", "trusted.large", &[7; 3000]);
    set("bin/large", "user.large", &[8; 900]);
    set("deep", "trusted.on-directory", b"d");
    set("deep", "user.on-directory", &[9; 1000]);
    set("absolute", "trusted.on-symlink", b"l");
    set("long-target", "trusted.on-symlink", &[1; 200]);
    set("null", "trusted.on-device", b"c");
    set("pipe", "security.on-pipe", b"p");
    // user::rw-, user:1000:r--, group::r--, mask::r--, other::---
    let acl = [
        2, 0, 0, 0, 1, 0, 6, 0, 255, 255, 255, 255, 2, 0, 4, 0, 232, 3, 0, 0, 4, 0, 4, 0, 255, 255, 255, 255,
        16, 0, 4, 0, 255, 255, 255, 255, 32, 0, 0, 0, 255, 255, 255, 255,
    ];
    set("bin/4095", "system.posix_acl_access", &acl);
    set("empty", "system.posix_acl_default", &acl);
    shell(
        root,
        "touch -d '1969-12-31T23:59:58.75Z' bin/4095; touch -d '2022-02-02T02:02:02.222222222Z' deep empty .",
    );
}

pub(crate) fn archived(root: &Path, to: &Path, options: &[&str]) {
    let mut args = vec!["--create", "--file", to.to_str().unwrap(), "--directory", root.to_str().unwrap()];
    args.extend(options);
    args.extend(["--numeric-owner", "."]);
    run("tar", &args);
}
