package shards

import (
	"fmt"
	"slices"

	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/store/rundir"
)

// Gather finds the newest checkpoint of which every file is on a host that is there, and has all hosts get all its files.
type Gather struct {
	survey
	id      uint64
	hosts   []Host
	waiting map[int]bool // places of hosts that have not answered

	trying  int // of found; -1 during the survey
	over    bool
	step    int
	refused []string
}

// NewGather begins to look for a checkpoint of a job, of no step after limit. hosts are all that take part.
func NewGather(id uint64, of rundir.Eras, limit int, hosts []Host) (*Gather, []Send) {
	g := &Gather{survey: survey{of: of, limit: limit}, id: id, hosts: hosts, waiting: make(map[int]bool), trying: -1}
	return g, g.ask()
}

// ask asks all hosts what comes next.
func (g *Gather) ask() (out []Send) {
	for _, h := range g.hosts {
		g.waiting[h.Place] = true
		out = append(out, g.Linked(h.Place)...)
	}
	return out
}

// Linked returns what a host is asked that has a new link.
func (g *Gather) Linked(host int) []Send {
	if !g.waiting[host] {
		return nil
	}
	if g.trying < 0 {
		return []Send{{host, control.Survey{ID: g.id, Of: g.of}}}
	}
	c := g.found[g.trying]
	keep := control.Keep{ID: g.id, Manifest: c.text, Verify: true, Commit: true}
	for i, from := range c.from {
		keep.Files = append(keep.Files, control.Wanted{File: i, From: from})
	}
	return []Send{{host, keep}}
}

// Over reports whether the work is done.
func (g *Gather) Over() bool { return g.over }

// Found returns the step of the checkpoint that all hosts have, 0 if there is none, and why newer ones are not used.
func (g *Gather) Found() (step int, refused []string) { return g.step, g.refused }

// Surveyed takes in what a host has.
func (g *Gather) Surveyed(host int, name string, m control.Surveyed) []Send {
	if m.ID != g.id || g.trying >= 0 || !g.waiting[host] {
		return nil
	}
	if m.Err != "" {
		g.refused = append(g.refused, fmt.Sprintf("%s: its checkpoints cannot be read: %s", name, m.Err))
	}
	g.take(name, m)
	return g.answered(host)
}

// Kept takes in that a host has all files, or why not.
func (g *Gather) Kept(host int, name string, m control.Kept) []Send {
	if m.ID != g.id || g.trying < 0 || !g.waiting[host] {
		return nil
	}
	if c := g.found[g.trying]; m.Err != "" && c.bad == "" {
		c.bad = fmt.Sprintf("the checkpoint of step %d is not used: %s: %s", c.manifest.Step, name, m.Err)
	}
	return g.answered(host)
}

// Lost takes in that a host is lost: what it has does not count, and it needs nothing.
func (g *Gather) Lost(host int) []Send {
	if !g.waiting[host] {
		return nil
	}
	g.hosts = slices.DeleteFunc(slices.Clone(g.hosts), func(h Host) bool { return h.Place == host })
	return g.answered(host)
}

func (g *Gather) answered(host int) []Send {
	if delete(g.waiting, host); len(g.waiting) > 0 {
		return nil
	}
	if g.trying < 0 {
		g.sort()
	} else if c := g.found[g.trying]; c.bad == "" {
		g.over, g.step = true, c.manifest.Step
		return nil
	} else {
		g.refused = append(g.refused, c.bad)
	}
	for g.trying++; g.trying < len(g.found); g.trying++ {
		c := g.found[g.trying]
		missing := c.missing()
		if missing == "" {
			g.id++
			return g.ask()
		}
		g.refused = append(g.refused, missing)
	}
	g.over = true
	return nil
}
