use std::{env, error::Error, sync::Arc};

use rustls::{
    ClientConfig, RootCertStore,
    crypto::ring,
    pki_types::{CertificateDer, pem::PemObject},
};
use tokio_postgres::{Config, config::SslMode};
use tokio_postgres_rustls::MakeRustlsConnect;

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let url = env::var("DATABASE_URL")?;
    // tokio-postgres leaves TLS to another crate, and refuses its parameters in a URL.
    let (address, parameters) = url.split_once('?').ok_or("no parameters in the URL")?;
    let ca = parameters
        .split('&')
        .find_map(|parameter| parameter.strip_prefix("sslrootcert="))
        .ok_or("no sslrootcert in the URL")?;

    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_file(ca)?)?;
    let tls = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()?
        .with_root_certificates(roots)
        .with_no_client_auth();

    let mut config: Config = address.parse()?;
    config.ssl_mode(SslMode::Require);
    let (client, connection) = config.connect(MakeRustlsConnect::new(tls)).await?;
    tokio::spawn(connection);
    let row = client.query_one("SELECT current_database()", &[]).await?;
    println!("{}", row.get::<_, &str>(0));
    Ok(())
}
