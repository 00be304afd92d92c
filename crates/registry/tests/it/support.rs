//! A fake registry: an HTTP/1.1 server on loopback whose answers a test writes, and which keeps what it was asked.

use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use dsec_registry::{Client, Digest, Limits, Reference, Settings};
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::{TcpListener, TcpStream};

pub(crate) const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
pub(crate) const INDEX: &str = "application/vnd.oci.image.index.v1+json";
pub(crate) const LAYER: &str = "application/vnd.oci.image.layer.v1.tar+gzip";

/// A request as it came.
#[derive(Debug, Clone)]
pub(crate) struct Asked {
    pub(crate) method: String,
    pub(crate) path: String,
    headers: Vec<(String, String)>,
    pub(crate) body: String,
}

impl Asked {
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(key, _)| key == name).map(|(_, value)| value.as_str())
    }
}

/// What is answered.
#[derive(Debug, Clone)]
pub(crate) struct Answer {
    status: u16,
    headers: Vec<(String, String)>,
    body: Vec<u8>,
    /// The connection ends after so many bytes of the body.
    cut: Option<usize>,
    /// The connection stays open after the cut.
    hangs: bool,
    /// It does not even begin.
    is_silent: bool,
    /// After the cut a byte comes in each such time.
    drips: Option<Duration>,
}

impl Answer {
    pub(crate) fn new(status: u16, body: impl Into<Vec<u8>>) -> Self {
        Self {
            status,
            headers: Vec::new(),
            body: body.into(),
            cut: None,
            hangs: false,
            is_silent: false,
            drips: None,
        }
    }

    pub(crate) fn with(mut self, name: &str, value: impl Into<String>) -> Self {
        self.headers.push((name.to_owned(), value.into()));
        self
    }

    pub(crate) fn is(&self, status: u16) -> bool {
        self.status == status
    }

    /// Ends the connection after so many bytes, or after all of them.
    pub(crate) fn cut(mut self, after: usize) -> Self {
        self.cut = Some(after.min(self.body.len()));
        self
    }

    pub(crate) fn hang(mut self, after: usize) -> Self {
        (self.cut, self.hangs) = (Some(after), true);
        self
    }

    pub(crate) fn silent() -> Self {
        Self { is_silent: true, ..Self::new(200, "") }
    }

    pub(crate) fn drip(mut self, after: usize, each: Duration) -> Self {
        (self.cut, self.drips) = (Some(after), Some(each));
        self
    }

    /// Of `whole`, what a range asks for.
    pub(crate) fn ranged(asked: &Asked, whole: &[u8]) -> Self {
        let from = asked
            .header("range")
            .and_then(|range| range.strip_prefix("bytes=")?.strip_suffix('-')?.parse().ok());
        match from {
            None => Self::new(200, whole),
            Some(from) => {
                let from: usize = from;
                let range = format!("bytes {from}-{}/{}", whole.len() - 1, whole.len());
                Self::new(206, &whole[from..]).with("content-range", range)
            }
        }
    }
}

type Handler = dyn Fn(&Asked) -> Answer + Send + Sync;

/// The server. It ends with the test's runtime.
pub(crate) struct Fake {
    pub(crate) address: SocketAddr,
    asked: Arc<Mutex<Vec<Asked>>>,
}

impl Fake {
    pub(crate) async fn start(handler: impl Fn(&Asked) -> Answer + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let asked = Arc::<Mutex<Vec<Asked>>>::default();
        let (handler, seen): (Arc<Handler>, _) = (Arc::new(handler), Arc::clone(&asked));
        tokio::spawn(async move {
            loop {
                let Ok((stream, _)) = listener.accept().await else { return };
                let (handler, seen) = (Arc::clone(&handler), Arc::clone(&seen));
                tokio::spawn(async move {
                    let _caller_gone = serve(stream, &*handler, &seen).await;
                });
            }
        });
        Self { address, asked }
    }

    /// An image with these layers, a name for all of which is a tag; and the diff ids that its configuration has.
    pub(crate) async fn with_image(image: Served) -> Self {
        Self::start(move |asked| image.answer(asked)).await
    }

    pub(crate) fn asked(&self) -> Vec<Asked> {
        self.asked.lock().unwrap().clone()
    }

    pub(crate) fn reference(&self, rest: &str) -> Reference {
        format!("docker://{}/{rest}", self.address).parse().unwrap()
    }

    pub(crate) fn client(&self, settings: Settings) -> Client {
        let settings = Settings { limits: Limits { pause: PAUSE, ..settings.limits }, ..settings };
        Client::new(&self.reference("team/app:1"), &settings).unwrap()
    }
}

/// Far longer than any registry is borne that these limits end.
pub(crate) const BORNE_MAX: Duration = Duration::from_secs(30);
/// Short, since nothing is to be spared here.
const PAUSE: Duration = Duration::from_millis(1);

async fn serve(stream: TcpStream, handler: &Handler, seen: &Mutex<Vec<Asked>>) -> io::Result<()> {
    let mut stream = BufReader::new(stream);
    loop {
        let mut lines = Vec::new();
        loop {
            let mut line = String::new();
            match stream.read_line(&mut line).await {
                Ok(0) => return Ok(()),
                Ok(_) => {}
                // No text, such as the first message of TLS.
                Err(_) => return stream.write_all(b"HTTP/1.0 400 Bad Request\r\n\r\n").await,
            }
            match line.trim_end() {
                "" => break,
                line => lines.push(line.to_owned()),
            }
        }
        let mut words = lines[0].split(' ').map(str::to_owned);
        let (method, path) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
        let header = |line: &String| {
            let (name, value) = line.split_once(':')?;
            Some((name.to_ascii_lowercase(), value.trim().to_owned()))
        };
        let headers: Vec<_> = lines[1..].iter().filter_map(header).collect();
        let mut asked = Asked { method, path, headers, body: String::new() };
        let length = asked.header("content-length").and_then(|length| length.parse().ok()).unwrap_or(0);
        let mut body = vec![0; length];
        stream.read_exact(&mut body).await?;
        asked.body = String::from_utf8_lossy(&body).into_owned();
        seen.lock().unwrap().push(asked.clone());
        let answer = handler(&asked);
        if answer.is_silent {
            std::future::pending::<()>().await;
        }
        let mut head = format!("HTTP/1.1 {} x\r\ncontent-length: {}\r\n", answer.status, answer.body.len());
        for (name, value) in &answer.headers {
            head.push_str(&format!("{name}: {value}\r\n"));
        }
        head.push_str("\r\n");
        stream.write_all(head.as_bytes()).await?;
        stream.write_all(&answer.body[..answer.cut.unwrap_or(answer.body.len())]).await?;
        stream.flush().await?;
        if let (Some(each), Some(cut)) = (answer.drips, answer.cut) {
            for byte in &answer.body[cut..] {
                tokio::time::sleep(each).await;
                stream.write_all(&[*byte]).await?;
                stream.flush().await?;
            }
        }
        if answer.hangs {
            std::future::pending::<()>().await;
        }
        if answer.cut.is_some() {
            return Ok(());
        }
    }
}

/// An image that is served whole.
#[derive(Clone)]
pub(crate) struct Served {
    pub(crate) layers: Vec<Vec<u8>>,
    pub(crate) config: Vec<u8>,
    pub(crate) manifest: Vec<u8>,
}

impl Served {
    pub(crate) fn new(layers: &[&[u8]], architecture: &str) -> Self {
        let diff_ids: Vec<String> = layers.iter().map(|layer| Digest::of(layer).to_string()).collect();
        let config = json!({
            "architecture": architecture, "os": "linux",
            "config": { "Env": ["A=b"] }, "rootfs": { "type": "layers", "diff_ids": diff_ids },
        });
        Self::with_config(layers, config.to_string().as_bytes())
    }

    pub(crate) fn with_config(layers: &[&[u8]], config: &[u8]) -> Self {
        let described: Vec<Value> = layers.iter().map(|layer| descriptor(LAYER, layer)).collect();
        let config_type = "application/vnd.oci.image.config.v1+json";
        let manifest = json!({
            "schemaVersion": 2, "mediaType": MANIFEST, "config": descriptor(config_type, config), "layers": described,
        });
        let layers = layers.iter().map(|layer| layer.to_vec()).collect();
        Self { layers, config: config.to_vec(), manifest: manifest.to_string().into_bytes() }
    }

    pub(crate) fn answer(&self, asked: &Asked) -> Answer {
        let Some(rest) = asked.path.strip_prefix("/v2/team/app/") else {
            return Answer::new(404, "no repository");
        };
        let manifest = Digest::of(&self.manifest).to_string();
        if rest == "manifests/1" || rest == format!("manifests/{manifest}") {
            return Answer::new(200, self.manifest.clone()).with("content-type", MANIFEST);
        }
        let blobs = self.layers.iter().chain([&self.config]);
        let found = blobs.into_iter().find(|blob| rest == format!("blobs/{}", Digest::of(blob)));
        found.map_or_else(|| Answer::new(404, "{}"), |blob| Answer::ranged(asked, blob))
    }
}

pub(crate) fn descriptor(media_type: &str, bytes: &[u8]) -> Value {
    json!({ "mediaType": media_type, "digest": Digest::of(bytes).to_string(), "size": bytes.len() })
}
