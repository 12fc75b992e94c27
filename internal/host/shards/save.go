// Package shards keeps checkpoints on hosts that share no file system. Each worker writes the file of its shards on its own host. For the
// leader, [Save] has other hosts copy it, so that every file is on several disks before the checkpoint counts, and [Gather] finds
// the newest checkpoint of which all files are there, and has the hosts get what they lack. Both are pure: what hosts answer goes in,
// messages come out. [Store] is the side of a host: it fetches files from others, and serves its own.
//
// A file that comes from another host is used only if it has the size and the SHA-256 of the manifest.
package shards

import (
	"fmt"
	"slices"

	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/store/checkpoint"
)

// maxManifest bounds a manifest that travels between hosts, in bytes.
const maxManifest = 8 << 20

// Host is a host of the run.
type Host struct {
	Place int
	Name  string
}

// Send is a message to a host.
type Send struct {
	Host    int // place
	Message control.Message
}

// Save makes a checkpoint whole: its files are on the hosts of their writers, and have to come to others.
type Save struct {
	id       uint64
	step     int
	manifest []byte
	self     int
	hosts    []Host
	waiting  map[int]bool // places of hosts that have not answered

	committing bool // all files are where they have to be, and the hosts write the manifest
	over       bool
	err        error
}

// NewSave begins to make a checkpoint whole. The files of m are on the hosts at the places of writers. hosts are all that have a link, self
// that of the leader, and each file is to be on as many of them as copies says.
func NewSave(id uint64, m checkpoint.Manifest, writers []int, hosts []Host, self, copies int) (*Save, []Send) {
	s := &Save{id: id, step: m.Step, self: self, hosts: hosts, waiting: make(map[int]bool)}
	m.Files = slices.Clone(m.Files)
	wanted := make(map[int][]control.Wanted)
	for i := range m.Files {
		at := slices.IndexFunc(hosts, func(h Host) bool { return h.Place == writers[i] })
		if at < 0 {
			return s, s.fail(fmt.Errorf("the host of %s has no link", m.Files[i].Name))
		}
		m.Files[i].Hosts = nil
		for k := range min(copies, len(hosts)) {
			h := hosts[(at+k)%len(hosts)]
			m.Files[i].Hosts = append(m.Files[i].Hosts, h.Name)
			wanted[h.Place] = append(wanted[h.Place], control.Wanted{File: i, From: []string{hosts[at].Name}})
		}
	}
	var err error
	if s.manifest, err = encode(&m); err != nil {
		return s, s.fail(err)
	}
	var out []Send
	for _, h := range hosts {
		if files := wanted[h.Place]; len(files) > 0 {
			s.waiting[h.Place] = true
			out = append(out, Send{h.Place, control.Keep{ID: s.id, Manifest: s.manifest, Files: files}})
		}
	}
	return s, out
}

func encode(m *checkpoint.Manifest) ([]byte, error) {
	text, err := m.Encode()
	if err == nil && len(text) > maxManifest {
		err = fmt.Errorf("the manifest has %d bytes; at most %d travel between hosts", len(text), maxManifest)
	}
	return text, err
}

// Step returns the step of the checkpoint.
func (s *Save) Step() int { return s.step }

// Over reports whether the work is done; err says why there is no checkpoint.
func (s *Save) Over() (over bool, err error) { return s.over, s.err }

func (s *Save) fail(err error) []Send {
	s.over, s.err = true, err
	clear(s.waiting)
	return nil
}

// Kept takes in the answer of a host.
func (s *Save) Kept(host int, name string, m control.Kept) []Send {
	if m.ID != s.id || !s.waiting[host] {
		return nil
	}
	if m.Err != "" && (!s.committing || host == s.self) {
		return s.fail(fmt.Errorf("%s: %s", name, m.Err))
	}
	delete(s.waiting, host)
	return s.next()
}

// Lost takes in that a host has no link any more.
func (s *Save) Lost(host int, name string) []Send {
	if !s.waiting[host] {
		return nil
	}
	if !s.committing {
		return s.fail(fmt.Errorf("%s has gone", name))
	}
	delete(s.waiting, host) // the others have the manifest
	return s.next()
}

func (s *Save) next() (out []Send) {
	switch {
	case len(s.waiting) > 0:
	case s.committing:
		s.over = true
	default:
		s.id, s.committing = s.id+1, true
		for _, h := range s.hosts {
			s.waiting[h.Place] = true
			out = append(out, Send{h.Place, control.Keep{ID: s.id, Manifest: s.manifest, Commit: true, Prune: true}})
		}
	}
	return out
}
