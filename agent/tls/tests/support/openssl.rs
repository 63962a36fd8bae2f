//! The program `openssl`, for certificates of other makers.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

fn openssl() -> Command {
    let mut command = Command::new("openssl");
    command.stdin(Stdio::null());
    command
}

fn run(command: &mut Command) -> Vec<u8> {
    let output = command
        .output()
        .expect("the program openssl is needed: install the package openssl");
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {errors}");
    output.stdout
}

/// A certificate that signs itself, and its key.
pub(crate) fn make(files: &[PathBuf; 2], arguments: &str) {
    let [certificate, key] = files;
    run(openssl()
        .args(["req", "-x509", "-nodes", "-subj", "/CN=localhost"])
        .args(["-addext", "subjectAltName=DNS:localhost"])
        .args(arguments.split(' '))
        .arg("-out")
        .arg(certificate)
        .arg("-keyout")
        .arg(key));
}

/// A certificate whose time is over, and its key.
pub(crate) fn expired(directory: &Path) -> (Vec<u8>, Vec<u8>) {
    let at = |name: &str| directory.join(name);
    make(&[at("unused"), at("expired.key")], "-newkey rsa:2048");
    fs::write(at("index"), "").unwrap();
    let settings = format!(
        "[ca]\ndefault_ca=d\n[d]\ndatabase={}\nrand_serial=yes\nnew_certs_dir={}\n\
         default_md=sha256\npolicy=p\n[p]\ncommonName=supplied\n",
        at("index").display(),
        directory.display()
    );
    fs::write(at("settings"), settings).unwrap();
    run(openssl()
        .args(["req", "-new", "-subj", "/CN=localhost", "-key"])
        .arg(at("expired.key"))
        .arg("-out")
        .arg(at("request")));
    run(openssl()
        .args(["ca", "-batch", "-selfsign", "-notext", "-config"])
        .arg(at("settings"))
        .args([
            "-startdate",
            "20200101000000Z",
            "-enddate",
            "20210101000000Z",
        ])
        .arg("-keyfile")
        .arg(at("expired.key"))
        .arg("-in")
        .arg(at("request"))
        .arg("-out")
        .arg(at("expired.crt")));
    let read = |name| fs::read(at(name)).unwrap();
    (read("expired.crt"), read("expired.key"))
}

/// The digest of a certificate's DER.
pub(crate) fn digest(certificate: &Path, algorithm: &str) -> Vec<u8> {
    let der = certificate.with_extension("der");
    run(openssl()
        .args(["x509", "-outform", "DER", "-in"])
        .arg(certificate)
        .arg("-out")
        .arg(&der));
    run(openssl()
        .args(["dgst", "-binary", &format!("-{algorithm}")])
        .arg(der))
}
