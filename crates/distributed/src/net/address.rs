//! Addresses: where rank 0 listens, and where others find a rank.
//!
//! Listening at all interfaces would show the port to networks that no rank is on.

use crate::error::CommError;
use crate::limits;
use crate::world::World;
use std::io::{self, ErrorKind};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, ToSocketAddrs, UdpSocket};

/// All addresses of a host name.
///
/// # Errors
/// The name is not known.
pub(crate) fn resolve(address: &str, port: u16) -> Result<Vec<SocketAddr>, CommError> {
    let bare = address.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).unwrap_or(address);
    let unknown = |e: io::Error| match limits::is_out_of_files(&e) {
        true => limits::system("the address of rank 0", &e),
        false => CommError::Start(format!(
            "the address of rank 0, {address}, is not known ({e}): set MASTER_ADDR to a name or address that all nodes know"
        )),
    };
    let mut addresses: Vec<SocketAddr> = (bare, port).to_socket_addrs().map_err(unknown)?.collect();
    addresses.dedup();
    match addresses.is_empty() {
        true => Err(unknown(io::Error::new(ErrorKind::NotFound, "the name has no address"))),
        false => Ok(addresses),
    }
}

/// Listens at the address of rank 0: at each of its addresses that this node has, else at the interface that
/// leads there (the address of a Kubernetes service belongs to no node).
///
/// # Errors
/// The name is not known, or the port is in use.
pub(crate) fn listen(world: &World) -> Result<Vec<TcpListener>, CommError> {
    let World { address, port, .. } = world;
    let resolved = resolve(address, *port)?;
    let mut listeners = Vec::new();
    let mut refused = None;
    for at in &resolved {
        match TcpListener::bind(at) {
            Ok(listener) => listeners.push(listener),
            Err(e) if e.kind() == ErrorKind::AddrInUse => return Err(in_use(*at)),
            Err(e) if limits::is_out_of_files(&e) => return Err(limits::system("a port for the ranks", &e)),
            Err(e) => refused = Some(e),
        }
    }
    if listeners.is_empty() {
        let leading = resolved.iter().find_map(|at| local_address_to(*at));
        listeners.extend(also_at(leading, *port)?);
    }
    // On many systems the host's own name is an address of the loopback interface, for this host alone.
    let is_local = |listener: &TcpListener| listener.local_addr().is_ok_and(|at| at.ip().is_loopback());
    if world.spans_nodes() && listeners.iter().all(is_local) {
        listeners.extend(also_at(default_address(), *port)?);
    }
    match (listeners.is_empty(), refused) {
        (false, _) => Ok(listeners),
        (true, refused) => Err(CommError::Start(format!(
            "rank 0 cannot listen at {address}:{port}{}: MASTER_ADDR must be an address of the node of rank 0",
            refused.map(|e| format!(" ({e})")).unwrap_or_default()
        ))),
    }
}

fn also_at(address: Option<IpAddr>, port: u16) -> Result<Option<TcpListener>, CommError> {
    let Some(address) = address else { return Ok(None) };
    let at = SocketAddr::new(address, port);
    match TcpListener::bind(at) {
        Ok(listener) => Ok(Some(listener)),
        Err(e) if e.kind() == ErrorKind::AddrInUse => Err(in_use(at)),
        Err(_) => Ok(None),
    }
}

fn in_use(at: SocketAddr) -> CommError {
    CommError::Start(format!(
        "port {} of {} is in use, perhaps by another run: set XTRAIN_PORT to a free port on all ranks",
        at.port(),
        at.ip()
    ))
}

/// An address at which other ranks reach this one: that of its connection to rank 0, unless other nodes
/// cannot reach this one.
pub(crate) fn reachable(own: IpAddr, world: &World) -> IpAddr {
    if own.is_loopback() && world.spans_nodes() { default_address().unwrap_or(own) } else { own }
}

/// This node's address on the interface that leads to `to`. Nothing is sent.
fn local_address_to(to: SocketAddr) -> Option<IpAddr> {
    let any: IpAddr = if to.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
    let socket = UdpSocket::bind((any, 0)).ok()?;
    socket.connect(to).ok()?;
    Some(socket.local_addr().ok()?.ip()).filter(|ip| !ip.is_unspecified())
}

/// This node's address on the interface of the default route.
fn default_address() -> Option<IpAddr> {
    // Addresses for documentation (RFC 5737, RFC 3849), which no interface has.
    let outside = [IpAddr::from([192, 0, 2, 1]), IpAddr::from([0x2001, 0xdb8, 0, 0, 0, 0, 0, 1])];
    outside.into_iter().find_map(|ip| local_address_to(SocketAddr::new(ip, 9))).filter(|ip| !ip.is_loopback())
}

/// The name of this node.
pub(crate) fn host_name() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(address: &str, port: u16) -> World {
        World { address: address.to_owned(), port, ..World::single() }
    }

    #[test]
    fn rank_0_listens_at_its_address_alone() {
        let listeners = listen(&at("127.0.0.1", 0)).expect("a port");
        let addresses: Vec<_> = listeners.iter().map(|l| l.local_addr().expect("an address").ip()).collect();
        assert_eq!(addresses, [IpAddr::from([127, 0, 0, 1])]);
    }

    #[test]
    fn a_name_with_several_addresses_is_tried_at_each() {
        assert!(listen(&at("localhost", 0)).is_ok());
        assert_eq!(resolve("[::1]", 5).expect("an address"), resolve("::1", 5).expect("an address"));
    }

    #[test]
    fn a_port_in_use_is_an_error_that_says_what_to_do() {
        let taken = TcpListener::bind("127.0.0.1:0").expect("a port");
        let port = taken.local_addr().expect("an address").port();
        let error = listen(&at("127.0.0.1", port)).expect_err("the port is taken").to_string();
        assert!(error.contains(&format!("port {port}")) && error.contains("XTRAIN_PORT"), "{error}");
    }

    #[test]
    fn an_unknown_name_is_an_error() {
        let error = listen(&at("no such host", 1)).expect_err("no such host").to_string();
        assert!(error.contains("no such host"), "{error}");
    }

    #[test]
    fn loopback_is_no_address_for_other_nodes() {
        let loopback = IpAddr::from([127, 0, 0, 1]);
        let alone = at("127.0.0.1", 0);
        assert_eq!(reachable(loopback, &alone), loopback);
        let spread = World { rank: xtrain_rank::Rank::first_of(2), ..alone };
        assert_eq!(reachable(loopback, &spread), default_address().unwrap_or(loopback));
        let outside = IpAddr::from([10, 0, 0, 7]);
        assert_eq!(reachable(outside, &spread), outside);
    }
}
