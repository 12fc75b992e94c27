package line

import (
	"fmt"
	"slices"
)

// Line is one end of a connection. All of it is under the lock of its hub. It decides what is to be sent and where what comes belongs; the hub has the socket read and written.
type Line struct {
	hub  *Hub
	sock socket
	lost func(error)
	err  error // why it has ended

	sentBytes, cameBytes int64

	// What goes out.
	posts  map[Name]*Message // that wait for their want
	wants  map[Name]int      // that have come before their message, with the size of the memory
	eagers map[Name]struct{} // names of eager messages that are not wanted yet
	ready  []*Message        // to be sent, in order
	small  []byte            // frames without data that are to be sent
	few    int               // of these, how many may wait for company
	now    bool              // and whether one may not
	head   []byte            // of the frame that is being sent, and small ones before it
	body   []byte            // rest of its data
	of     *Message          // whose data they are; nil: body is ours
	polled bool              // the goroutine that sleeps waits for room

	// What comes in.
	expects map[Name]*Message
	early   map[Name][]byte // eager messages that are not expected yet
	buf     []byte          // has bytes of the stream from its start on
	have    int
	left    int      // bytes still to come of the present frame
	into    *Message // that they belong to
	keep    []byte   // or early message
	kept    Name     // and its name
}

// pending reports whether something could not be sent yet.
func (l *Line) pending() bool { return len(l.head)+len(l.body) > 0 }

// wanted reports whether what we wait for is to come on the line.
func (l *Line) wanted() bool { return len(l.expects) > 0 || len(l.posts) > 0 }

// Post has a message sent. The data must not change until it has ended.
func (l *Line) Post(m *Message, name Name, data []byte) {
	h := l.hub
	h.mu.Lock()
	defer h.mu.Unlock()
	*m = Message{line: l, name: name, data: data}
	_, eager := l.eagers[name]
	switch room, wanted := l.wants[name]; {
	case l.err != nil:
		m.end(l.err)
		return
	case eager || l.posts[name] != nil:
		m.end(fmt.Errorf("%w: %+v", ErrUsed, name))
		return
	case wanted:
		delete(l.wants, name)
		if room != len(data) {
			m.end(fmt.Errorf("%w: %d bytes, want %d", ErrSize, len(data), room))
			return
		}
		l.ready = append(l.ready, m)
	case len(data) <= MaxEager && len(l.eagers) < maxEagers:
		l.eagers[name] = struct{}{}
		l.ready = append(l.ready, m)
		m.size = -1 // as an eager one
	default:
		l.posts[name] = m
		return
	}
	h.write(l)
}

// Expect has a message received into buf, which has its size and must not be touched until the message has ended.
func (l *Line) Expect(m *Message, name Name, buf []byte) {
	h := l.hub
	h.mu.Lock()
	defer h.mu.Unlock()
	*m = Message{line: l, name: name, data: buf, in: true}
	switch {
	case l.err != nil:
		m.end(l.err)
		return
	case l.expects[name] != nil:
		m.end(fmt.Errorf("%w: %+v", ErrUsed, name))
		return
	case len(l.expects) == maxWants:
		m.end(fmt.Errorf("%w: more than %d", ErrMany, maxWants))
		return
	}
	switch data, ok := l.early[name]; {
	case ok:
		delete(l.early, name)
		if m.take(len(data)); m.err == nil {
			copy(buf, data)
			m.end(nil)
		}
		h.reuse(data)
		l.want(m)
	case l.keep != nil && l.kept == name: // half of it is here
		data, l.keep = l.keep, nil
		if m.take(len(data)); m.err == nil {
			m.at = copy(buf, data[:len(data)-l.left])
			l.into = m
			l.expect(m)
		}
		h.reuse(data)
	default:
		l.expect(m)
	}
	if l.now {
		h.write(l)
	}
}

// expect notes that a message is to come, and says so.
func (l *Line) expect(m *Message) {
	l.expects[m.name] = m
	l.want(m)
}

// want says that there is memory for a message. Where the message may come without that, it is no hurry.
func (l *Line) want(m *Message) {
	l.small = frame{kind: kindWant, name: m.name, size: len(m.data)}.append(l.small)
	if len(m.data) <= MaxEager {
		l.few++
	}
	l.now = l.now || len(m.data) > MaxEager || l.few >= company
}

// take notes the size of a message that comes.
func (m *Message) take(size int) {
	if m.size = size; size != len(m.data) {
		m.end(fmt.Errorf("%w: %d bytes, want %d", ErrSize, size, len(m.data)))
	}
}

// end ends a message.
func (m *Message) end(err error) {
	if m.over {
		return
	}
	m.over, m.err = true, err
	if h := m.line.hub; h.asleep {
		h.ring()
	}
}

// Cancel ends a message with an error, unless it has ended. Its memory is the caller's again.
func (m *Message) Cancel(err error) {
	if m.line == nil {
		return
	}
	l := m.line
	l.hub.mu.Lock()
	defer l.hub.mu.Unlock()
	if m.over {
		return
	}
	if m.in {
		delete(l.expects, m.name)
		if l.into == m {
			l.into = nil
		}
	} else {
		delete(l.posts, m.name)
		if i := slices.Index(l.ready, m); i >= 0 {
			l.ready = slices.Delete(l.ready, i, i+1)
		}
		if l.of == m { // the rest of its frame goes out from memory of ours
			l.body, l.of = slices.Clone(l.body), nil
		}
	}
	m.end(err)
}

// begin drops what belongs to earlier versions of a group.
func (l *Line) begin(stale func(Name) bool) {
	for n := range l.wants {
		if stale(n) {
			delete(l.wants, n)
		}
	}
	for n := range l.eagers {
		if stale(n) {
			delete(l.eagers, n)
		}
	}
	for n := range l.early {
		if stale(n) {
			delete(l.early, n)
		}
	}
}

// dropOlder drops what belongs to versions of a group that the peer has left.
func (l *Line) dropOlder(than Name) {
	l.begin(func(n Name) bool { return n.Group == than.Group && n.Version.Compare(than.Version) < 0 })
}

// fail ends the line.
func (l *Line) fail(err error) {
	if l.err != nil {
		return
	}
	l.err = err
	for _, m := range l.posts {
		m.end(err)
	}
	for _, m := range l.expects {
		m.end(err)
	}
	for _, m := range l.ready {
		m.end(err)
	}
	if l.of != nil {
		l.of.end(err)
	}
	l.posts, l.expects, l.wants, l.eagers, l.early, l.ready, l.of, l.into, l.body, l.head, l.small = nil, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil
}

// output returns what is to be sent next. Wants of eager messages go along with what else there is, or, with all set, by themselves.
func (l *Line) output(all bool) (head, body []byte) {
	if l.pending() {
		return l.head, l.body
	}
	l.of = nil
	if len(l.ready) == 0 && !l.now && !(all && l.few > 0) {
		return nil, nil
	}
	l.head, l.small = l.small, l.head[:0]
	l.few, l.now = 0, false
	if len(l.ready) > 0 {
		m := l.ready[0]
		n := min(maxChunk, len(m.data)-m.at)
		f := frame{kind: kindData, length: n, name: m.name, size: len(m.data)}
		if m.size < 0 {
			f.kind = kindEager
		}
		l.head = f.append(l.head)
		l.body, l.of = m.data[m.at:m.at+n], m
	}
	return l.head, l.body
}

// wrote takes note of n bytes that are sent of what output returned.
func (l *Line) wrote(n int) {
	l.sentBytes += int64(n)
	k := min(n, len(l.head))
	if k == len(l.head) {
		l.head = l.head[:0]
	} else {
		l.head = l.head[:copy(l.head, l.head[k:])]
	}
	l.body = l.body[n-k:]
	if l.pending() || l.of == nil {
		return
	}
	m := l.of
	l.of = nil
	m.at += min(maxChunk, len(m.data)-m.at)
	if m.at == len(m.data) {
		l.ready = slices.Delete(l.ready, 0, 1) // it is the first until it has ended
		m.end(nil)
	}
}

// input returns where to read to: to the memory of a message, and behind it to that of the line.
func (l *Line) input() (direct, buf []byte) {
	if l.have == 0 && l.left > 0 {
		switch {
		case l.into != nil:
			direct = l.into.data[l.into.at:][:l.left]
		case l.keep != nil:
			direct = l.keep[len(l.keep)-l.left:]
		}
	}
	return direct, l.buf[l.have:]
}

// came takes n bytes that were read to where input said.
func (l *Line) came(n int, direct []byte) error {
	l.cameBytes += int64(n)
	k := min(n, len(direct))
	l.pass(k)
	l.have += n - k
	b := l.buf[:l.have]
	for {
		if l.left > 0 {
			k := min(l.left, len(b))
			if l.into != nil {
				copy(l.into.data[l.into.at:], b[:k])
			} else if l.keep != nil {
				copy(l.keep[len(l.keep)-l.left:], b[:k])
			}
			l.pass(k)
			b = b[k:]
			if l.left > 0 {
				break
			}
		}
		if len(b) < header {
			break
		}
		f, err := decode(b)
		if err != nil {
			return err
		}
		b = b[header:]
		if err := l.take(f); err != nil {
			return err
		}
	}
	l.have = copy(l.buf, b)
	return nil
}

// pass notes that n bytes of the present frame are where they belong.
func (l *Line) pass(n int) {
	l.left -= n
	m := l.into
	if m != nil {
		m.at += n
	}
	switch {
	case l.left > 0:
	case m != nil:
		l.into = nil
		if m.at == m.size {
			delete(l.expects, m.name)
			m.end(nil)
		}
	case l.keep != nil:
		l.early[l.kept], l.keep = l.keep, nil
	}
}

// take takes a frame, whose data follow.
func (l *Line) take(f frame) error {
	l.left, l.into, l.keep = f.length, nil, nil
	stale := l.hub.stale(f.name)
	if f.kind == kindWant {
		if m := l.posts[f.name]; m != nil {
			delete(l.posts, f.name)
			if f.size != len(m.data) {
				m.end(fmt.Errorf("%w: %d bytes, want %d", ErrSize, len(m.data), f.size))
				return nil
			}
			l.ready = append(l.ready, m)
			return nil
		}
		if _, eager := l.eagers[f.name]; eager {
			delete(l.eagers, f.name)
			return nil
		}
		if stale {
			return nil
		}
		if len(l.wants) == 2*maxWants { // some may be of operations that have ended
			return fmt.Errorf("%w: more than %d wants without a message", ErrProtocol, 2*maxWants)
		}
		l.wants[f.name] = f.size
		return nil
	}
	if m := l.expects[f.name]; m != nil {
		if m.at == 0 {
			m.take(f.size)
		}
		switch {
		case m.err != nil:
			delete(l.expects, m.name)
			return nil
		case f.size != m.size || f.length > m.size-m.at:
			return fmt.Errorf("%w: %d more bytes of a message of %d, which has %d", ErrProtocol, f.length, m.size, m.at)
		}
		l.into = m
		l.pass(0)
		return nil
	}
	if f.kind == kindEager && !stale {
		if len(l.early) == maxEarly {
			l.dropOlder(f.name)
		}
		if l.early[f.name] != nil || len(l.early) == maxEarly {
			return fmt.Errorf("%w: more early messages than a line keeps", ErrProtocol)
		}
		l.keep, l.kept = l.hub.memory(f.length), f.name
		l.pass(0)
	}
	return nil // what is not expected belongs to an operation that has ended
}
