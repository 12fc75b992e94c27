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

// survey is what hosts say that they have of a run's checkpoints.
type survey struct {
	of    rundir.Eras
	limit int // newest step that counts
	found []*candidate
}

// candidate is a checkpoint of which hosts have the manifest.
type candidate struct {
	manifest checkpoint.Manifest
	text     []byte
	files    string     // digest of the manifest without the hosts of the files
	on       []string   // names of the hosts that have the manifest
	from     [][]string // names of the hosts that have each file
	bad      string     // why it cannot be used
}

// maxCandidates bounds the checkpoints that are looked at.
const maxCandidates = 64

// take takes in what a host has. Manifests that differ in nothing but the hosts of the files are of one checkpoint: files are copied
// again when hosts have gone, and not all hosts may have heard of it.
func (s *survey) take(name string, m control.Surveyed) {
	for _, h := range m.Found {
		if len(h.Manifest) > maxManifest || len(s.found) >= maxCandidates {
			continue
		}
		m, err := checkpoint.ParseManifest(h.Manifest)
		if err != nil || !s.of.Has(m.Job, m.Step) || m.Step > s.limit || len(h.Has) != len(m.Files) {
			continue
		}
		files, err := withoutHosts(m)
		if err != nil {
			continue
		}
		i := slices.IndexFunc(s.found, func(c *candidate) bool { return c.files == files })
		if i < 0 {
			i = len(s.found)
			s.found = append(s.found, &candidate{manifest: *m, text: h.Manifest, files: files, from: make([][]string, len(m.Files))})
		}
		c := s.found[i]
		if slices.Contains(c.on, name) {
			continue
		}
		c.on = append(c.on, name)
		for file, has := range h.Has {
			if has {
				c.from[file] = append(c.from[file], name)
			}
			for _, host := range m.Files[file].Hosts {
				if had := &c.manifest.Files[file].Hosts; !slices.Contains(*had, host) {
					*had = append(*had, host)
				}
			}
		}
	}
}

// withoutHosts returns the digest of a manifest without the hosts of its files.
func withoutHosts(m *checkpoint.Manifest) (string, error) {
	bare := *m
	bare.Files = slices.Clone(m.Files)
	for i := range bare.Files {
		bare.Files[i].Hosts = nil
	}
	text, err := bare.Encode()
	if err != nil {
		return "", err
	}
	again, err := checkpoint.ParseManifest(text)
	if err != nil {
		return "", err
	}
	return again.Digest, nil
}

// sort puts the newest first.
func (s *survey) sort() {
	slices.SortFunc(s.found, func(a, b *candidate) int {
		return cmp.Or(b.manifest.Step-a.manifest.Step, b.manifest.Plan.Compare(a.manifest.Plan))
	})
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
