//! A plane alone, to try `kubectl` against it: `cargo run -p cocoon-plane --example serve -- FOLDER [PORT]`.
//! Writes `FOLDER/kubeconfig` (administrator) and `FOLDER/node.kubeconfig` (the node `n1`).

use std::{path::Path, sync::Arc};

use cocoon_kit::{tls, world::RealWorld};
use cocoon_plane::plane::{Plane, PlaneConfig};
use tokio_util::sync::CancellationToken;

type Failure = Box<dyn std::error::Error>;

#[tokio::main(flavor = "multi_thread", worker_threads = 2)]
async fn main() -> Result<(), Failure> {
    cocoon_kit::telemetry::init("info");
    let mut arguments = std::env::args().skip(1);
    let folder = arguments.next().ok_or("usage: serve FOLDER [PORT]")?;
    let folder = Path::new(&folder);
    let port: u16 = arguments.next().map_or(Ok(0), |port| port.parse())?;
    let authority = tls::Authority::load_or_create(&folder.join("pki"), "example-ca")?;
    let server = authority.issue_server("plane", &["localhost"], &[[127, 0, 0, 1].into()])?;
    let kubelet = authority.issue_client("plane", &["system:masters"])?;
    let config = PlaneConfig {
        journal: Some(folder.join("plane.db")),
        tokens: vec![],
        kubelet_client: Some(tls::client_config(&kubelet, authority.certificate())?),
    };
    let plane = Plane::open(config, Arc::new(RealWorld)).await?;
    plane.publish_authority(authority.certificate());
    let listener = tokio::net::TcpListener::bind(("127.0.0.1", port)).await?;
    let url = format!("https://{}", listener.local_addr()?);
    write_kubeconfig(folder, "kubeconfig", &url, &authority, "admin", &["system:masters"])?;
    write_kubeconfig(folder, "node.kubeconfig", &url, &authority, "system:node:n1", &["system:nodes"])?;
    println!("export KUBECONFIG={}", folder.join("kubeconfig").display());
    let shutdown = CancellationToken::new();
    let stop = shutdown.clone();
    tokio::spawn(async move {
        let _ = tokio::signal::ctrl_c().await;
        stop.cancel();
    });
    let config = tls::server_config(&server, authority.certificate())?;
    let (served, ()) = tokio::join!(
        plane.serve(listener, config, shutdown.clone()),
        plane.run_controllers(shutdown.clone())
    );
    Ok(served?)
}

fn write_kubeconfig(
    folder: &Path,
    file: &str,
    url: &str,
    authority: &tls::Authority,
    user: &str,
    groups: &[&str],
) -> Result<(), Failure> {
    let client = authority.issue_client(user, groups)?;
    let (certificate, key) = (folder.join(format!("{file}.crt")), folder.join(format!("{file}.key")));
    cocoon_kit::files::replace(&certificate, client.certificate.as_bytes(), 0o600)?;
    cocoon_kit::files::replace(&key, client.key.as_bytes(), 0o600)?;
    let text = format!(
        "apiVersion: v1\nkind: Config\ncurrent-context: c\n\
         clusters: [{{name: c, cluster: {{server: \"{url}\", certificate-authority: pki/ca.crt}}}}]\n\
         users: [{{name: c, user: {{client-certificate: {file}.crt, client-key: {file}.key}}}}]\n\
         contexts: [{{name: c, context: {{cluster: c, user: c}}}}]\n"
    );
    Ok(cocoon_kit::files::replace(&folder.join(file), text.as_bytes(), 0o600)?)
}
