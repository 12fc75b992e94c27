package model

import (
	"crypto/sha256"
	"encoding/hex"
	"hash"
	"path/filepath"
	"slices"

	"github.com/soliton-train/soliton/internal/compute/kernel"
	"github.com/soliton-train/soliton/internal/store/rundir"
	"github.com/soliton-train/soliton/internal/worker/engine"
)

// HashSize is the number of bytes of both hashes.
const HashSize = 2 * sha256.Size

// Hashes returns params_sha256 and state_sha256 as the run's files have them, out of what a collector returned.
func Hashes(b []byte) (params, state string) {
	return hex.EncodeToString(b[:sha256.Size]), hex.EncodeToString(b[sha256.Size:])
}

// collector hashes the state of the job, and writes the files of the model where there is a run directory.
type collector struct {
	params *Params
	runDir string
	config []byte
	file   *writer // nil without a run directory, and after Finish

	h          hash.Hash
	paramsHash []byte // once all parameters have come
}

// Collector returns what takes in the state of a job at its end. It returns the hashes of all parameters, and of these and the
// optimizer's numbers. It writes the model file and config to runDir, unless that is "".
func (p *Params) Collector(runDir string, config []byte) (engine.Collector, error) {
	c := &collector{params: p, runDir: runDir, config: config, h: sha256.New()}
	if runDir == "" {
		return c, nil
	}
	var err error
	if c.file, err = p.newWriter(filepath.Join(runDir, File)); err != nil {
		return nil, err
	}
	return c, nil
}

// Take implements [engine.Collector].
func (c *collector) Take(part engine.Part, data []float32) error {
	if part.Moment >= 0 && c.paramsHash == nil {
		c.paramsHash = c.h.Sum(nil)
	}
	c.h.Write(kernel.Bytes(data))
	if c.file == nil || part.Moment >= 0 {
		return nil
	}
	at := 0 // first element of the tensor
	for _, t := range c.params.Layers[part.Layer].Tensors {
		from, to := max(part.Lo, at), min(part.Lo+len(data), at+t.Size)
		if from < to {
			if err := c.file.w.Write(data[from-part.Lo : to-part.Lo]); err != nil {
				return err
			}
		}
		at += t.Size
	}
	return nil
}

// Finish implements [engine.Collector].
func (c *collector) Finish() ([]byte, error) {
	if c.file != nil {
		file := c.file
		c.file = nil
		if err := file.commit(); err != nil {
			return nil, err
		}
		if err := rundir.WriteFile(filepath.Join(c.runDir, ConfigFile), c.config); err != nil {
			return nil, err
		}
	}
	state := c.h.Sum(nil)
	if c.paramsHash == nil {
		c.paramsHash = state
	}
	return append(slices.Clone(c.paramsHash), state...), nil
}

// Discard implements [engine.Collector].
func (c *collector) Discard() {
	if c.file != nil {
		c.file.f.Discard()
	}
}
