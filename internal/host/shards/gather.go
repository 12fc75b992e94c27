package shards

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/store/checkpoint"
	"github.com/soliton-train/soliton/internal/store/rundir"
)

// Gather finds the newest checkpoint of which every file is on a host that is there, and has all hosts get all its files.
type Gather struct {
	id      uint64
	of      rundir.Eras
	limit   int // newest step that counts
	hosts   []Host
	waiting map[int]bool // places of hosts that have not answered

	found   []*candidate // newest first, after the survey
	trying  int          // of found; -1 during the survey
	over    bool
	step    int
	refused []string
}

// candidate is a checkpoint of which hosts have the manifest.
type candidate struct {
	manifest checkpoint.Manifest
	text     []byte
	from     [][]string // names of the hosts that have each file
	bad      string     // why it cannot be used
}

// maxCandidates bounds the checkpoints that are looked at.
const maxCandidates = 64

// NewGather begins to look for a checkpoint of a job, of no step after limit. hosts are all that take part.
func NewGather(id uint64, of rundir.Eras, limit int, hosts []Host) (*Gather, []Send) {
	g := &Gather{id: id, of: of, limit: limit, hosts: hosts, waiting: make(map[int]bool), trying: -1}
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
	for _, h := range m.Found {
		g.take(name, h)
	}
	return g.answered(host)
}

func (g *Gather) take(name string, h control.Holding) {
	if len(h.Manifest) > maxManifest || len(g.found) >= maxCandidates {
		return
	}
	m, err := checkpoint.ParseManifest(h.Manifest)
	if err != nil || !g.of.Has(m.Job, m.Step) || m.Step > g.limit || len(h.Has) != len(m.Files) {
		return
	}
	i := slices.IndexFunc(g.found, func(c *candidate) bool { return c.manifest.Digest == m.Digest })
	if i < 0 {
		i = len(g.found)
		g.found = append(g.found, &candidate{manifest: *m, text: h.Manifest, from: make([][]string, len(m.Files))})
	}
	for file, has := range h.Has {
		if has {
			g.found[i].from[file] = append(g.found[i].from[file], name)
		}
	}
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
		slices.SortFunc(g.found, func(a, b *candidate) int {
			return cmp.Or(b.manifest.Step-a.manifest.Step, b.manifest.Plan.Compare(a.manifest.Plan))
		})
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

// maxNamed is how many missing files are named.
const maxNamed = 3

// missing says which files no host has that is there, and which hosts had them; "" if there is none.
func (c *candidate) missing() string {
	var names []string
	more := 0
	for i, f := range c.manifest.Files {
		switch {
		case len(c.from[i]) > 0:
		case len(names) == maxNamed:
			more++
		case len(f.Hosts) == 0:
			names = append(names, f.Name)
		default:
			names = append(names, fmt.Sprintf("%s (on %s)", f.Name, strings.Join(f.Hosts, " and ")))
		}
	}
	if len(names) == 0 {
		return ""
	}
	if more > 0 {
		names = append(names, fmt.Sprintf("%d more", more))
	}
	return fmt.Sprintf("the checkpoint of step %d is not used: missing are %s", c.manifest.Step, strings.Join(names, ", "))
}
