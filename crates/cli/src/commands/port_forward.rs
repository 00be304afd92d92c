//! `dsec port-forward`: ports of a sandbox on this machine, over the platform's TCP streams.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use clap::Args;
use clap_complete::engine::ArgValueCandidates;
use dsec_model::SandboxId;
use futures_util::{SinkExt, StreamExt};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio_tungstenite::tungstenite::Message;

use super::signals::Signals;
use super::{Context, completion};
use crate::client::{Client, ClientError, Socket};
use crate::failure::{Failure, Outcome};
use crate::render;

pub(crate) const EXAMPLES: &str = "\
Examples:
  dsec port-forward sb-n1-abc 8080:80       http://127.0.0.1:8080 is port 80 in the sandbox
  dsec port-forward sb-n1-abc 5432          the same number on both sides
  dsec port-forward sb-n1-abc 0:80 0:5432   free ports, which are printed

It listens on this machine's loopback alone unless --address says otherwise. Ctrl-C ends it.";

/// Connections at once: each holds two descriptors here and one on the platform.
const CONNECTIONS_MAX: usize = 256;
/// Bytes of one message.
const CHUNK: usize = 64 << 10;

/// `dsec port-forward`.
#[derive(Debug, Args)]
pub(crate) struct PortForwardArgs {
    /// The sandbox
    #[arg(add = ArgValueCandidates::new(completion::sandbox_ids))]
    id: SandboxId,
    /// Port here, 0 for a free one, and port in the sandbox
    #[arg(required = true, value_name = "LOCAL:REMOTE", value_parser = ports)]
    ports: Vec<Ports>,
    /// Address here to listen on
    #[arg(long, value_name = "IP", default_value_t = IpAddr::V4(Ipv4Addr::LOCALHOST))]
    address: IpAddr,
}

/// One pair of ports.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Ports {
    local: u16,
    remote: u16,
}

/// `LOCAL:REMOTE`, or `REMOTE` for the same number here.
fn ports(text: &str) -> Result<Ports, String> {
    let (local, remote) = text.split_once(':').unwrap_or((text, text));
    let number = |text: &str| text.parse::<u16>().map_err(|_| format!("{text:?} is not a port, 0 to 65535"));
    match (number(local)?, number(remote)?) {
        (_, 0) => Err("the sandbox has no port 0".to_owned()),
        (local, remote) => Ok(Ports { local, remote }),
    }
}

/// Where one listener's connections go.
struct Forward {
    client: Client,
    sandbox: SandboxId,
    remote: u16,
    room: Arc<Semaphore>,
}

/// Listens and passes connections on until it is told to end.
pub(crate) async fn port_forward(context: &Context, args: PortForwardArgs) -> Outcome {
    let mut signals = Signals::new()?;
    // A mistyped sandbox is told of now and not at the first connection.
    context.client.sandbox(&args.id).await?;
    let room = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    let (mut listeners, mut shown) = (JoinSet::new(), Vec::new());
    for Ports { local, remote } in args.ports {
        let address = SocketAddr::new(args.address, local);
        let failed = |error| Failure::io(format!("cannot listen on {address}"), &error);
        let listener = TcpListener::bind(address).await.map_err(failed)?;
        let bound = listener.local_addr().map_err(failed)?;
        shown.push((bound, remote));
        let (client, sandbox, room) = (context.client.clone(), args.id.clone(), Arc::clone(&room));
        listeners.spawn(listen(listener, Forward { client, sandbox, remote, room }));
    }
    for (bound, remote) in shown {
        if context.global.json {
            render::json_line(
                &serde_json::json!({ "listen": bound, "sandbox_id": args.id, "port": remote }),
            )?;
        } else {
            render::line(&format!("{bound} -> {}:{remote}", args.id))?;
        }
    }
    tokio::select! {
        asked = signals.next() => Ok(asked.exit_code()),
        ended = listeners.join_next() => match ended {
            Some(Ok(failure)) => Err(failure),
            _ => Err(Failure::new("a listener ended")),
        },
    }
}

/// Passes connections on until none can be taken any more.
async fn listen(listener: TcpListener, forward: Forward) -> Failure {
    let forward = Arc::new(forward);
    loop {
        let Ok(room) = Arc::clone(&forward.room).acquire_owned().await else {
            return Failure::new("the forwarding is over");
        };
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => return Failure::io("cannot take a connection", &error),
        };
        let forward = Arc::clone(&forward);
        tokio::spawn(async move {
            let _room = room;
            let path = format!("/v1/sandboxes/{}/ports/{}/tcp", forward.sandbox, forward.remote);
            match forward.client.websocket(&path).await {
                Ok(socket) => join(stream, socket).await,
                // The caller sees a connection that closes at once; the person here is told why.
                Err(error) => refused(&forward, error),
            }
        });
    }
}

fn refused(forward: &Forward, error: ClientError) {
    let failure = Failure::from(error);
    render::note(&format!("dsec: no connection to {}:{}: {failure}", forward.sandbox, forward.remote));
}

/// Bytes both ways until the server in the sandbox has ended, or either side is gone. The end of the caller's
/// side is passed on as an empty message: the close of a WebSocket would end both directions.
async fn join(stream: TcpStream, socket: Socket) {
    let _ = stream.set_nodelay(true);
    let (mut read, mut write) = stream.into_split();
    let (mut sink, mut messages) = socket.split();
    let into = async {
        let mut buffer = BytesMut::with_capacity(CHUNK);
        loop {
            buffer.reserve(CHUNK);
            match read.read_buf(&mut buffer).await {
                Ok(0) => {
                    let _ = sink.send(Message::Binary(Bytes::new())).await;
                    // What comes back ends it.
                    std::future::pending::<()>().await;
                }
                Ok(_) if sink.send(Message::Binary(buffer.split().freeze())).await.is_ok() => {}
                Ok(_) | Err(_) => return,
            }
        }
    };
    let out_of = async {
        while let Some(Ok(message)) = messages.next().await {
            match message {
                Message::Binary(bytes) if write.write_all(&bytes).await.is_err() => return,
                Message::Close(_) => break,
                _ => {}
            }
        }
        let _ = write.shutdown().await;
    };
    tokio::select! {
        () = into => {}
        () = out_of => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ports_are_a_pair_or_one_for_both() {
        assert_eq!(ports("8080:80"), Ok(Ports { local: 8080, remote: 80 }));
        assert_eq!(ports("0:80"), Ok(Ports { local: 0, remote: 80 }));
        assert_eq!(ports("80"), Ok(Ports { local: 80, remote: 80 }));
        for bad in ["", "80:", ":80", "80:0", "0", "65536", "a:b", "1:2:3"] {
            assert!(ports(bad).is_err(), "{bad:?} was taken");
        }
    }
}
