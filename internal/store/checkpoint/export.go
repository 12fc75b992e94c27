package checkpoint

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strconv"

	"github.com/soliton-train/soliton/internal/store/safetensors"
)

// ErrNoTensors is the error of exporting a checkpoint whose manifest does not say how the tensors of the model are called.
var ErrNoTensors = errors.New("the manifest does not name the tensors, which those of version 1 never do")

// exportChunk is how many numbers are in memory at a time.
const exportChunk = 1 << 18

// ExportModel writes the parameters as the file of a trained model has them.
func (r *Reader) ExportModel(ctx context.Context, w io.Writer) error {
	return r.export(ctx, w, nil, nil)
}

// ExportOptimizer writes the moments: tensors with the names and shapes of the parameters, and the name of the moment and a slash before. The
// metadata has the number of updates that are in them as "step": those of the run, and so many before it.
func (r *Reader) ExportOptimizer(ctx context.Context, w io.Writer, before int) error {
	return r.export(ctx, w, r.Moments(), map[string]string{"step": strconv.Itoa(before + r.manifest.Step)})
}

// export writes moments or, without any, the parameters.
func (r *Reader) export(ctx context.Context, w io.Writer, moments []string, more map[string]string) error {
	m := &r.manifest
	if m.Tensors == nil {
		return fmt.Errorf("checkpoint of step %d: %w", m.Step, ErrNoTensors)
	}
	var infos []safetensors.Info
	prefixes := []string{""}
	if len(moments) > 0 {
		prefixes = nil
		for _, name := range moments {
			prefixes = append(prefixes, name+"/")
		}
	}
	for _, p := range prefixes {
		for _, t := range m.Tensors {
			infos = append(infos, safetensors.Info{Name: p + t.Name, Shape: t.Shape})
		}
	}
	metadata := map[string]string{"format": "pt"}
	maps.Copy(metadata, more)
	out, err := safetensors.NewWriter(w, metadata, infos)
	if err != nil {
		return err
	}
	buffer := make([]float32, min(exportChunk, max(slices.Max(m.Layers), 1)))
	for i := range prefixes {
		layer, at := 0, 0 // of the next tensor
		for _, t := range m.Tensors {
			if t.Layer != layer {
				layer, at = t.Layer, 0
			}
			for end := at + t.Len(); at < end; {
				part := buffer[:min(len(buffer), end-at)]
				values, states := part, [][]float32(nil)
				if len(moments) > 0 {
					values, states = nil, make([][]float32, len(moments))
					states[i] = part
				}
				if err := r.Read(ctx, layer, at, at+len(part), values, states); err != nil {
					return err
				}
				if err := out.Write(part); err != nil {
					return err
				}
				at += len(part)
			}
		}
	}
	return out.Close()
}
