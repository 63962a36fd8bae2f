//! The certificates and keys of a cluster, made anew for each.

use std::{
    fs, io,
    net::{IpAddr, Ipv4Addr},
    path::{Path, PathBuf},
};

use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa,
    Issuer, KeyPair, KeyUsagePurpose, SanType,
};
use snafu::{ResultExt, Snafu};

use crate::plan::kubeconfig;

#[derive(Debug, Snafu)]
pub enum Error {
    #[snafu(display("cannot make a certificate for {name}"))]
    Issue { name: String, source: rcgen::Error },
    #[snafu(display("cannot write {}", path.display()))]
    Write { path: PathBuf, source: io::Error },
}

/// A CA and the directory that it writes to.
#[derive(Debug)]
pub(crate) struct Pki {
    directory: PathBuf,
    issuer: Issuer<'static, KeyPair>,
    authority: String,
}

impl Pki {
    /// Makes the CA (`ca.crt`) and the key that signs tokens of service accounts (`tokens.key`, the
    /// public half `tokens.pub`).
    pub(crate) fn new(directory: &Path) -> Result<Self, Error> {
        fs::create_dir_all(directory).context(WriteSnafu { path: directory })?;
        let name = "branchpool-e2e";
        let mut parameters = named(name, None);
        parameters.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        parameters.key_usages = vec![
            KeyUsagePurpose::KeyCertSign,
            KeyUsagePurpose::CrlSign,
            KeyUsagePurpose::DigitalSignature,
        ];
        let key = KeyPair::generate().context(IssueSnafu { name })?;
        let certificate = parameters.self_signed(&key).context(IssueSnafu { name })?;
        let pki = Self {
            directory: directory.to_owned(),
            authority: certificate.pem(),
            issuer: Issuer::new(parameters, key),
        };
        pki.write("ca.crt", &pki.authority)?;
        let name = "tokens";
        let tokens = KeyPair::generate().context(IssueSnafu { name })?;
        pki.write("tokens.key", &tokens.serialize_pem())?;
        pki.write("tokens.pub", &tokens.public_key_pem())?;
        Ok(pki)
    }

    pub(crate) fn path(&self, file: &str) -> PathBuf {
        self.directory.join(file)
    }

    /// Of the CA, in PEM.
    pub(crate) fn authority(&self) -> &str {
        &self.authority
    }

    /// Certificate and key of a server.
    pub(crate) fn server(
        &self,
        name: &str,
        dns: &[&str],
        addresses: &[Ipv4Addr],
    ) -> Result<(String, String), Error> {
        let mut parameters = named(name, None);
        parameters.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        let names = dns
            .iter()
            .map(|dns| (*dns).try_into().map(SanType::DnsName))
            .collect::<Result<Vec<_>, _>>()
            .context(IssueSnafu { name })?;
        let addresses = addresses
            .iter()
            .map(|address| SanType::IpAddress(IpAddr::V4(*address)));
        parameters.subject_alt_names = names.into_iter().chain(addresses).collect();
        self.issue(name, parameters)
    }

    /// Certificate and key of a client, which are its user name and group.
    pub(crate) fn client(
        &self,
        user: &str,
        group: Option<&str>,
    ) -> Result<(String, String), Error> {
        let mut parameters = named(user, group);
        parameters.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
        self.issue(user, parameters)
    }

    /// A kubeconfig with a client's certificate.
    pub(crate) fn kubeconfig(
        &self,
        server: &str,
        user: &str,
        group: Option<&str>,
    ) -> Result<String, Error> {
        let (certificate, key) = self.client(user, group)?;
        Ok(kubeconfig(server, &self.authority, &certificate, &key))
    }

    fn issue(
        &self,
        name: &str,
        mut parameters: CertificateParams,
    ) -> Result<(String, String), Error> {
        parameters.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        let key = KeyPair::generate().context(IssueSnafu { name })?;
        let certificate = parameters
            .signed_by(&key, &self.issuer)
            .context(IssueSnafu { name })?;
        Ok((certificate.pem(), key.serialize_pem()))
    }

    /// Writes certificate and key to `<file>.crt` and `<file>.key`.
    pub(crate) fn keep(
        &self,
        file: &str,
        (certificate, key): &(String, String),
    ) -> Result<(PathBuf, PathBuf), Error> {
        Ok((
            self.write(&format!("{file}.crt"), certificate)?,
            self.write(&format!("{file}.key"), key)?,
        ))
    }

    pub(crate) fn write(&self, file: &str, text: &str) -> Result<PathBuf, Error> {
        let path = self.path(file);
        write_private(&path, text).context(WriteSnafu { path: &path })?;
        Ok(path)
    }
}

/// Writes a file that only its owner may read.
pub(crate) fn write_private(path: &Path, text: &str) -> io::Result<()> {
    use std::{io::Write, os::unix::fs::OpenOptionsExt};
    let mut file = fs::File::options()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .open(path)?;
    file.write_all(text.as_bytes())
}

/// rcgen's parameters are valid from 1975 to 4096; a cluster lasts hours.
fn named(user: &str, group: Option<&str>) -> CertificateParams {
    let mut parameters = CertificateParams::default();
    let mut name = DistinguishedName::new();
    name.push(DnType::CommonName, user);
    if let Some(group) = group {
        name.push(DnType::OrganizationName, group);
    }
    parameters.distinguished_name = name;
    parameters
}
