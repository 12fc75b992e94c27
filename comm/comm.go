// Package comm moves tensors between the workers of a job: links between sessions, messages named by what they hold, and groups
// whose membership is edited in place.
//
//	e, err := comm.Listen(comm.Config{Self: self, Transport: comm.TCP{}})
//	err = e.SetMembers(peers)              // which sessions are admitted
//	g, err := comm.NewGroup(e, 1)
//	_, err = g.Edit(ctx, version, members) // again after every change; links that exist stay
//	err = g.AllReduce(ctx, comm.Call{Version: version, Step: 7}, gradient)
//
// An [Endpoint] has one link to every member it talks to. [Endpoint.Post] and [Endpoint.Expect] move single messages: a [Key] of
// kind [User] names the content, so it does not matter which member sends it, and further copies are dropped. A [Group] runs
// Barrier, Broadcast, AllGather, ReduceScatter, AllReduce and TreeReduce under one version of its member list. The sum of
// TreeReduce has the same bits on any number of members.
//
// A lost member ends the operations of its groups with a [GroupError] and nothing else: the process, the other links and
// messages go on, and the next Edit begins a new version with the members that are left.
package comm

import (
	"crypto/tls"

	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/net/comm"
	"github.com/soliton-train/soliton/internal/net/group"
	"github.com/soliton-train/soliton/internal/net/transport"
)

// Identities.
type (
	// WorkerID names a worker for the life of a job.
	WorkerID = id.WorkerID
	// Session is one life of a worker. A worker that is restarted is a new session.
	Session = id.Session
	// Version is the version of a group's member list. It only grows.
	Version = id.Version
	// Peer is a session and the address at which its endpoint listens.
	Peer = comm.Peer
)

// Endpoints.
type (
	// Config configures an endpoint. Self and Transport have no default.
	Config = comm.Config
	// Endpoint has the links of one session.
	Endpoint = comm.Endpoint
	// Key names the content of a message.
	Key = comm.Key
	// Priority orders what waits to be sent to one peer: lower goes first.
	Priority = comm.Priority
)

// User is the kind of keys that are free for the caller.
const User = comm.KindUser

// Priorities: Control overtakes all bulk between two chunks; bulk counts from Bulk upwards.
const (
	Control = comm.Control
	Bulk    = comm.Bulk
)

// Listen opens an endpoint that admits no peer yet.
func Listen(c Config) (*Endpoint, error) { return comm.Listen(c) }

// Transports.
type (
	// Transport makes the connections of an endpoint.
	Transport = transport.Transport
	// TCP is the transport over TCP. The zero value listens on the loopback interface and encrypts nothing.
	TCP = transport.TCP
	// Host is the transport between workers of one host, through sockets in a folder that they share. Their collectives pass through
	// memory that they share, where the system allows it.
	Host = transport.Host
	// Mem is a network within one process, for tests in testing/synctest bubbles.
	Mem = transport.Mem
)

// NewMem returns an empty network.
func NewMem() *Mem { return transport.NewMem() }

// TLSFromSecret returns a configuration for TCP under which only processes that hold the secret can talk to each other. The
// secret is at least 16 random bytes.
func TLSFromSecret(secret []byte) (*tls.Config, error) { return transport.TLSFromSecret(secret) }

// Groups.
type (
	// Group is an ordered list of members that run collective operations together.
	Group = group.Group
	// Call names one operation of a group; all members give the same.
	Call = group.Call
)

// NewGroup returns the group with this number, which is the same on all members, without members yet.
func NewGroup(e *Endpoint, number uint16) (*Group, error) { return group.New(e, number) }

// Errors.
type (
	// Error is the failure of one message, link or call on an endpoint.
	Error = comm.Error
	// GroupError is the failure of an operation of a group. It ends the group's version.
	GroupError = group.Error
)

// Classes of errors, for [errors.Is].
var (
	// ErrClosed: the endpoint or the group was closed.
	ErrClosed = comm.ErrClosed
	// ErrVersion: the operation names another version than the group's present one.
	ErrVersion = comm.ErrVersion
	// ErrLink: the link to the peer was lost, which is evidence about the link and not about the peer.
	ErrLink = comm.ErrLink
	// ErrNotMember: the session is not admitted, or was evicted.
	ErrNotMember = comm.ErrNotMember
)
