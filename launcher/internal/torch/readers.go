package torch

import (
	"errors"
	"fmt"
)

// With Job.data_workers, processes of their own read samples, while the one that computes runs passes. Each reads one sample at a time. One
// that exits or stays stopped is replaced, and its sample read again.

// maxReaders bounds Job.data_workers, as python/soliton/_describe.py has it.
const maxReaders = 64

// reader is a place for a process that reads. The goroutine that has taken it out of Program.readers uses it.
type reader struct {
	number int         // from 1
	conn   *connection // nil for none
}

// openReaders makes places for n processes, which begin with their first samples.
func (p *Program) openReaders(n int) {
	p.readers = make(chan *reader, n)
	for i := range n {
		p.readers <- &reader{number: i + 1}
	}
}

// sample has a process read a sample: numbers are those of askSample. Any number of goroutines may call it.
func (p *Program) sample(numbers ...int) error {
	if cap(p.readers) == 0 {
		_, err := p.call(askSample, numbers...)
		return err
	}
	r := <-p.readers
	defer func() { p.readers <- r }()
	for deaths := 1; ; deaths++ {
		err := p.readWith(r, numbers)
		p.output.flush()
		if !errors.As(err, new(*lostError)) {
			return err
		}
		if r.conn != nil {
			r.conn.Close()
			r.conn = nil
		}
		if deaths == maxDeaths {
			return &failure{Text: fmt.Sprintf("the Python process that reads samples exited %d times for one sample; the worker's log has what it printed", deaths)}
		}
	}
}

func (p *Program) readWith(r *reader, numbers []int) (err error) {
	if r.conn == nil {
		p.mu.Lock()
		r.conn, err = p.child(r.number)
		p.mu.Unlock()
		if err != nil {
			return err
		}
	}
	if err := r.conn.send(askSample, numbers...); err != nil {
		return err
	}
	_, _, err = r.conn.done()
	return err
}

// endReaders ends the processes that read.
func (p *Program) endReaders() {
	for range cap(p.readers) {
		if r := <-p.readers; r.conn != nil {
			r.conn.Close()
		}
	}
}
