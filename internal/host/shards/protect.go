package shards

import (
	"fmt"
	"slices"

	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/store/rundir"
)

// Protect has the newest whole checkpoint copied again after hosts have gone or come: each of its files to as many hosts as there are to
// be copies, and its manifest to all, any of which may have to find it when it leads or resumes.
type Protect struct {
	survey
	id      uint64
	hosts   []Host
	copies  int
	waiting map[int]bool // places of hosts that have not answered

	phase  protecting
	keep   []byte // manifest that the hosts are to have
	step   int
	copied int // files
	err    error
}

type protecting int

const (
	asking     protecting = iota // what hosts have
	copying                      // files
	committing                   // the manifest
	protected
)

// NewProtect begins to protect the newest checkpoint of a run, of no step after limit. hosts are all that have a link, and each file is to
// be on as many of them as copies says.
func NewProtect(id uint64, of rundir.Eras, limit int, hosts []Host, copies int) (*Protect, []Send) {
	p := &Protect{survey: survey{of: of, limit: limit}, id: id, hosts: hosts, copies: copies, waiting: make(map[int]bool)}
	var out []Send
	for _, h := range hosts {
		p.waiting[h.Place] = true
		out = append(out, Send{h.Place, control.Survey{ID: id, Of: of}})
	}
	return p, out
}

// Over reports whether the work is done; err says why not all of it could be.
func (p *Protect) Over() (over bool, err error) { return p.phase == protected, p.err }

// Copied returns the step of the checkpoint, and how many of its files other hosts were to get.
func (p *Protect) Copied() (step, files int) { return p.step, p.copied }

func (p *Protect) fail(err error) []Send {
	p.phase, p.err = protected, err
	return nil
}

// Surveyed takes in what a host has.
func (p *Protect) Surveyed(host int, name string, m control.Surveyed) []Send {
	if m.ID != p.id || p.phase != asking || !p.waiting[host] {
		return nil
	}
	p.take(name, m)
	if delete(p.waiting, host); len(p.waiting) > 0 {
		return nil
	}
	return p.choose()
}

// choose finds out what the newest whole checkpoint lacks.
func (p *Protect) choose() (out []Send) {
	p.sort()
	i := slices.IndexFunc(p.found, func(c *candidate) bool { return c.missing() == "" })
	if i < 0 {
		p.phase = protected
		return nil
	}
	c := p.found[i]
	m := c.manifest
	p.step, m.Files = m.Step, slices.Clone(m.Files)
	wanted := make(map[int][]control.Wanted)
	for file, from := range c.from {
		has := slices.Clone(from)
		at := slices.IndexFunc(p.hosts, func(h Host) bool { return h.Name == from[0] })
		for k := 1; len(has) < min(p.copies, len(p.hosts)); k++ {
			if h := p.hosts[(at+k)%len(p.hosts)]; !slices.Contains(has, h.Name) {
				has = append(has, h.Name)
				wanted[h.Place] = append(wanted[h.Place], control.Wanted{File: file, From: from})
				p.copied++
			}
		}
		m.Files[file].Hosts = has
	}
	if p.copied == 0 && len(c.on) == len(p.hosts) {
		p.phase = protected
		return nil
	}
	var err error
	if p.keep, err = encode(&m); err != nil {
		return p.fail(err)
	}
	p.id, p.phase = p.id+1, copying
	for _, h := range p.hosts {
		if files := wanted[h.Place]; len(files) > 0 {
			p.waiting[h.Place] = true
			out = append(out, Send{h.Place, control.Keep{ID: p.id, Manifest: p.keep, Files: files}})
		}
	}
	return append(out, p.next()...)
}

// Kept takes in the answer of a host.
func (p *Protect) Kept(host int, name string, m control.Kept) []Send {
	if m.ID != p.id || !p.waiting[host] {
		return nil
	}
	if m.Err != "" {
		return p.fail(fmt.Errorf("%s: %s", name, m.Err))
	}
	delete(p.waiting, host)
	return p.next()
}

// Lost takes in that a host has no link any more: what the others are to have is another question then.
func (p *Protect) Lost(host int, name string) {
	if slices.ContainsFunc(p.hosts, func(h Host) bool { return h.Place == host }) && p.phase != protected {
		p.fail(fmt.Errorf("%s has gone", name))
	}
}

func (p *Protect) next() (out []Send) {
	switch {
	case len(p.waiting) > 0:
	case p.phase == committing:
		p.phase = protected
	default:
		p.id, p.phase = p.id+1, committing
		for _, h := range p.hosts {
			p.waiting[h.Place] = true
			out = append(out, Send{h.Place, control.Keep{ID: p.id, Manifest: p.keep, Commit: true}})
		}
	}
	return out
}
