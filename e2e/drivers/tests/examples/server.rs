//! A Postgres server with TLS, for one run of the tests.

use std::{
    fs,
    net::TcpListener,
    os::unix::fs::{PermissionsExt, chown},
    path::{Path, PathBuf},
    process::Command,
};

use branchpool_e2e_drivers::{Config, Driver, Password};
use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair};
use tempfile::TempDir;

/// Postgres does not run as root: nobody.
const USER: u32 = 65534;
const ROLE: &str = "app";
const PASSWORD: &str = "not-a-secret";

pub(crate) struct Server {
    binaries: PathBuf,
    directory: TempDir,
    port: u16,
}

impl Server {
    pub(crate) fn start() -> Self {
        let server = Self {
            binaries: binaries(),
            directory: tempfile::tempdir().unwrap(),
            port: free_port(),
        };
        let root = server.directory.path();
        fs::set_permissions(root, fs::Permissions::from_mode(0o755)).unwrap();
        chown(root, Some(USER), Some(USER)).unwrap();
        server.write_certificates();
        let data = server.data();
        let initdb = [
            "-D",
            &data,
            "-U",
            "postgres",
            "-E",
            "UTF8",
            "--locale=C",
            "-N",
            "-A",
            "peer",
        ];
        finish(server.command("initdb", &initdb));
        server.configure();
        let log = root.join("log").display().to_string();
        finish(server.command("pg_ctl", &["-D", &data, "-l", &log, "-w", "start"]));
        server.sql(&format!("CREATE ROLE {ROLE} LOGIN PASSWORD '{PASSWORD}'"));
        // One each, as they have a branch each: notifications reach all of a database.
        for driver in Driver::ALL {
            server.sql(&format!("CREATE DATABASE \"{driver}\" OWNER {ROLE}"));
        }
        server
    }

    /// With the certificate authority that is right, and the name.
    pub(crate) fn over_tls(&self, driver: Driver) -> Config {
        Config {
            host: "localhost".to_owned(),
            port: self.port,
            user: ROLE.to_owned(),
            password: Some(Password(PASSWORD.to_owned())),
            database: driver.name().to_owned(),
            ca: Some(self.file("ca.crt")),
            only: Vec::new(),
        }
    }

    /// An authority that has not signed the server's certificate.
    pub(crate) fn other_ca(&self) -> PathBuf {
        self.file("other.crt")
    }

    fn file(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn data(&self) -> String {
        self.file("data").display().to_string()
    }

    fn write_certificates(&self) {
        let (certificate, issuer) = authority("Branchpool test");
        fs::write(self.file("ca.crt"), certificate).unwrap();
        fs::write(self.file("other.crt"), authority("Another").0).unwrap();
        let key = KeyPair::generate().unwrap();
        let parameters = CertificateParams::new(["localhost".to_owned()]).unwrap();
        let certificate = parameters.signed_by(&key, &issuer).unwrap();
        fs::write(self.file("server.crt"), certificate.pem()).unwrap();
        let path = self.file("server.key");
        fs::write(&path, key.serialize_pem()).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
        chown(&path, Some(USER), Some(USER)).unwrap();
    }

    fn configure(&self) {
        let root = self.directory.path().display();
        let port = self.port;
        let settings = format!(
            "listen_addresses = '127.0.0.1'\nport = {port}\nunix_socket_directories = '{root}'\n\
             ssl = on\nssl_cert_file = '{root}/server.crt'\nssl_key_file = '{root}/server.key'\n\
             fsync = off\n"
        );
        let data = self.file("data");
        fs::write(data.join("postgresql.auto.conf"), settings).unwrap();
        let rules = "local all all peer map=root\nhostssl all all 127.0.0.1/32 scram-sha-256\n";
        fs::write(data.join("pg_hba.conf"), rules).unwrap();
        let map = format!("root root {ROLE}\nroot root postgres\n");
        fs::write(data.join("pg_ident.conf"), map).unwrap();
    }

    /// One of Postgres' programs, as the user that the server runs as.
    fn command(&self, program: &str, arguments: &[&str]) -> Command {
        let mut command = Command::new("setpriv");
        command
            .args([format!("--reuid={USER}"), format!("--regid={USER}")])
            .arg("--clear-groups")
            .arg(self.binaries.join(program))
            .args(arguments);
        command
    }

    fn sql(&self, statement: &str) {
        let mut command = Command::new("psql");
        command
            .args([
                "-XqU",
                "postgres",
                "-d",
                "postgres",
                "-p",
                &self.port.to_string(),
                "-h",
            ])
            .arg(self.directory.path())
            .args(["-c", statement]);
        finish(command);
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let arguments = ["-D", &self.data(), "-m", "immediate", "-w", "stop"];
        // It may have failed to start, and that panic says why.
        let _ = self.command("pg_ctl", &arguments).output();
    }
}

fn authority(name: &str) -> (String, Issuer<'static, KeyPair>) {
    let key = KeyPair::generate().unwrap();
    let mut parameters = CertificateParams::default();
    parameters.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    parameters.distinguished_name.push(DnType::CommonName, name);
    let certificate = parameters.self_signed(&key).unwrap().pem();
    (certificate, Issuer::new(parameters, key))
}

/// Of the newest major that is installed.
fn binaries() -> PathBuf {
    let majors = fs::read_dir("/usr/lib/postgresql").unwrap();
    let newest = majors
        .filter_map(|entry| entry.unwrap().file_name().to_str()?.parse::<u32>().ok())
        .filter(|major| Path::new(&format!("/usr/lib/postgresql/{major}/bin/initdb")).exists())
        .max();
    PathBuf::from(format!("/usr/lib/postgresql/{}/bin", newest.unwrap()))
}

fn free_port() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    listener.local_addr().unwrap().port()
}

fn finish(mut command: Command) {
    let output = command.output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {said}");
}
