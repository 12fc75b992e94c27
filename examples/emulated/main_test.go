package main

import (
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/soliton-train/soliton/trainer"
	"github.com/soliton-train/soliton/trainer/trainertest"
)

func TestLayer(t *testing.T) {
	trainertest.Layer(t, newLayer(newDevice(), 0, 0), trainer.Spec{Shape: []int{width}}, trainertest.Options{})
}

// A device is as fast as it is told in the mean, whatever else its tasks wait for.
func TestDevice(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newDevice()
		began := time.Now()
		for range 100 {
			from := time.Now()
			time.Sleep(300 * time.Microsecond) // of the bubble: what is computed
			d.take(from, time.Millisecond)
		}
		if took := time.Since(began); took != 100*time.Millisecond {
			t.Errorf("100 tasks of 1ms took %v", took)
		}
		began = time.Now()
		time.Sleep(3 * time.Millisecond)
		d.take(began, time.Millisecond) // computes for longer than the device would
		d.take(time.Now(), time.Millisecond)
		d.take(time.Now(), time.Millisecond)
		if took := time.Since(began); took != 4*time.Millisecond {
			t.Errorf("a late task and two more took %v", took)
		}
	})
}

func TestJob(t *testing.T) {
	j, err := job(3, 1, 0)
	if err != nil || len(j.Model.Layers) != 3 || !strings.Contains(j.Model.Name, "emulated") {
		t.Errorf("%+v, %v", j.Model, err)
	}
	for _, c := range []struct {
		layers int
		ms     float64
		hidden int
		want   string
	}{{0, 1, 0, "--layers"}, {1, -1, 0, "--layer-ms"}, {1, 1e9, 0, "--layer-ms"}, {1, 1, -1, "--hidden"}, {1, 1, 1 << 30, "--hidden"}} {
		if _, err := job(c.layers, c.ms, c.hidden); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%+v: %v", c, err)
		}
	}
}
